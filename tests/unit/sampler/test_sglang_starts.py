"""Starts of an SGLang server that somebody else runs, and may set up anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.sampler.examples import prompt, row

from tinsmith.errors import NotSupported, ServerError
from tinsmith.testing import tiny_model
from tinsmith_sampler.sglang.engine import SglangEngine
from tinsmith_sampler.sglang.inspecting import Inspection

FOUND = Inspection(
    version="0.5.23", device="cpu", dtype="float32", context_length=100, base_checksum="a"
)


class Client:
    """Of a start in which ``found`` is found."""

    def __init__(self, found):
        self.found = found
        self.asked = []

    async def metrics(self):
        return ""

    async def generate(self, body):
        self.asked.append(body)
        raise AssertionError("it is drawn on")


class Server:
    """Its start of the moment is ``client``."""

    def __init__(self, found):
        self.client = Client(found)

    async def start(self):
        return self.client

    async def current(self):
        return self.client

    async def close(self):
        pass


@pytest.fixture
async def started(tmp_path, monkeypatch):
    async def inspect(client, *_, **__):
        return client.found

    monkeypatch.setattr("tinsmith_sampler.sglang.engine.inspect", inspect)
    folder, server = tiny_model.build(tmp_path, family="qwen3_moe"), Server(FOUND)
    engine = SglangEngine(str(folder), lambda _: server, max_rows=2, max_rank=8)
    await engine.start()
    yield engine, server
    await engine.close()


async def test_what_requests_may_ask_for_is_what_the_newest_start_has(started):
    engine, server = started
    asked = replace(row(prompt=prompt(3), max_tokens=4), routed_experts=True)
    with pytest.raises(NotSupported, match="return_routed_experts: the SGLang server was not"):
        await engine.generate(asked)

    server.client = Client(replace(FOUND, routed_experts=True))
    with pytest.raises(AssertionError, match="drawn on"):
        await engine.generate(asked)
    assert server.client.asked[0].return_routed_experts

    server.client = Client(FOUND)
    with pytest.raises(NotSupported, match="return_routed_experts: the SGLang server was not"):
        await engine.generate(asked)


async def test_a_start_with_other_weights_is_not_used(started):
    engine, server = started
    server.client = Client(replace(FOUND, base_checksum="b"))

    with pytest.raises(ServerError, match="after a restart"):
        await engine.generate(row(prompt=prompt(3), max_tokens=4))

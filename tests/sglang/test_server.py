"""Servers of our own and given ones: they start, come back, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.sglang import running
from tests.sglang.requests import (
    PROMPT,
    adapter,
    closing,
    request,
    scores,
    scoring,
    true_scores,
    with_adapter,
)
from tests.unit.sampler.examples import row
from tests.unit.sampler.routers import true_routes
from transformers import AutoModelForCausalLM

from tinsmith.errors import ConfigError, ServerError, StartupError
from tinsmith.testing import tiny_model
from tinsmith_sampler.sglang import base_model
from tinsmith_sampler.sglang.client import SglangClient
from tinsmith_sampler.sglang.engine import SglangEngine
from tinsmith_sampler.sglang.routes import routes
from tinsmith_sampler.sglang.server import GivenServer, OwnServer, check_given

PROC = Path("/proc")


def test_a_server_comes_back_and_dies_with_its_keeper(model, tmp_path):
    command = [sys.executable, "-m", "tests.sglang.keeper", model, tmp_path / "sglang.log"]
    keeper = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    try:
        first = json.loads(keeper.stdout.readline())
        processes = _group(first["pid"])
        assert first["healthy"]
        os.kill(_named(processes, "sglang::sched"), signal.SIGKILL)

        second = json.loads(keeper.stdout.readline())
        assert second["healthy"]
        assert second["pid"] != first["pid"]
        _wait_gone(processes)

        processes = _group(second["pid"])
        assert len(processes) >= 3
        keeper.kill()
        _wait_gone(processes)
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()


async def test_a_mixture_of_experts_tells_its_routes_and_closing_ends_all_of_it(tmp_path):
    model = tiny_model.build(tmp_path / "model", family="qwen3_moe")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
    options = running.options(model, routed_experts=True, lora_targets=attention)
    server = OwnServer(options, tmp_path / "sglang.log")
    async with closing(server):
        client = await server.start()
        processes = _group(server.pid)
        answer = await client.generate(request(ask={"return_routed_experts": True}))
        tokens = [*PROMPT, *answer.output_ids]
        await client.load_adapter_from_tensors("x", *adapter(model, 1))
        scored = await client.generate(scoring(tokens))
        adapted = await client.generate(scoring(tokens, adapter="x"))
        rows = await _drawn_on(server, model)
        key = _key(client)
        assert not any(key in (PROC / f"{one}/cmdline").read_text() for one in processes)

    hf_model = AutoModelForCausalLM.from_pretrained(model)
    assert scores(scored) == pytest.approx(true_scores(hf_model, tokens), abs=1e-4)
    with_it = with_adapter(AutoModelForCausalLM.from_pretrained(model), *adapter(model, 1))
    assert scores(adapted) == pytest.approx(true_scores(with_it, tokens), abs=1e-4)
    expected = true_routes(model, tokens)
    mixture = base_model.read(str(model)).mixture
    told = routes(answer.meta_info.routed_experts, mixture, len(expected))
    np.testing.assert_array_equal(told, expected)
    for drawn in rows:
        expected = true_routes(model, [*PROMPT, *drawn.tokens])
        np.testing.assert_array_equal(drawn.experts, expected)
    assert rows[1].stop_reason == "stop"  # ended by us, beside the server's own ends
    await server.wait_ended()
    _wait_gone(processes)
    with pytest.raises(ServerError, match="shutting down"):
        await server.current()


async def _drawn_on(server, model):
    """A row, and the same one up to one of its tokens, by an engine on a server that runs."""
    client = await server.current()
    given = GivenServer(client.url, key=_key(client))
    engine = SglangEngine(str(model), lambda _: given, max_rows=4, max_rank=4)
    await engine.start()
    try:
        asked = replace(row(prompt=np.array(PROMPT, np.int32)), routed_experts=True)
        first = await engine.generate(asked)
        stop = msgspec.structs.replace(asked.params, stop_tokens=(int(first.tokens[2]),))
        return [first, await engine.generate(replace(asked, params=stop))]
    finally:
        await engine.close()


def _key(client):
    return client._http._headers["Authorization"].split()[1]


async def test_a_start_that_fails_says_what_the_server_said(tmp_path):
    options = running.options(tmp_path / "no-such-model")
    server = OwnServer(options, tmp_path / "sglang.log")
    with pytest.raises(StartupError, match=r"(?s)before it was ready.*sglang\.log:.*no-such-model"):
        await server.start()
    await server.close()


async def test_an_interpreter_without_sglang_is_refused_with_the_remedy(model, tmp_path):
    for python, reason in ((Path(sys.executable), "has no SGLang"), (tmp_path, "cannot be run")):
        server = OwnServer(running.options(model, python=python), tmp_path / "sglang.log")
        with pytest.raises(ConfigError, match=rf"{reason}.*make sglang"):
            await server.start()
        await server.close()


async def test_a_given_server_is_used_and_left_alone(server):
    given = GivenServer(server.url, key=server.key)
    async with closing(given):
        client = await given.start()
        assert await given.current() is client
        assert len((await client.generate(request())).output_ids) == 8

    await given.wait_ended()
    async with closing(SglangClient(server.url, key=server.key)) as client:
        assert await client.health()


async def test_a_given_server_that_cannot_be_used_is_refused(server):
    for url, key in (("http://127.0.0.1:9", ""), (server.url, "another")):
        given = GivenServer(url, key=key)
        with pytest.raises(StartupError, match=r"sglang_url: .* cannot be used"):
            await given.start()
        await given.close()


async def test_a_given_server_of_another_kind_is_refused(client):
    info = await client.server_info()
    check_given(info, "there")
    for change, told in (
        ({"version": "0.5.20"}, r"0\.5\.20.*0\.5\.23"),
        ({"enable_deterministic_inference": False}, "without --enable-deterministic-inference"),
        ({"enable_lora": None}, "without --enable-lora"),
        ({"max_loaded_loras": 4}, "--max-loaded-loras 4"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_given(msgspec.structs.replace(info, **change), "there")


def _group(pid):
    """All processes of a server."""
    return [one for one in map(int, filter(str.isdigit, os.listdir(PROC))) if _group_of(one) == pid]


def _group_of(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _named(pids, text):
    """The one whose name has that in it."""
    return next(pid for pid in pids if text in (PROC / f"{pid}/comm").read_text())


def _wait_gone(pids):
    deadline = time.monotonic() + 120
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.1)


def _runs(pid):
    """A zombie does not: its parent will hear of it."""
    try:
        return (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

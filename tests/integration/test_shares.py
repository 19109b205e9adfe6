"""Limits of an owner over all gateways, samples over its share, and those that nobody waits for."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from tinsmith import ids
from tinsmith.config import Config
from tinsmith.messages.registry import ServedModel
from tinsmith.messages.sampling import SampleDone
from tinsmith.messages.services import SampleReady, ServiceAlive
from tinsmith.messages.table import HELD, SAMPLE_READY, SAMPLES, SERVED, SERVICE_ALIVE
from tinsmith.sealing import Seals
from tinsmith_gateway.app import build_app, build_runner
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.gateway import Gateway

MODEL = "tiny/llama"
KEY = "tml-shares"
JSON = "application/json"
SHARE, MOST = 2, 5
PATIENCE_S = 90


class Front:
    """One gateway, and requests to it."""

    def __init__(self, url, http):
        self._url = url
        self._http = http

    async def post(self, path, body, *, key=KEY):
        url, headers = f"{self._url}/api/v1/{path}", {"X-API-Key": key}
        async with self._http.post(url, json=body, headers=headers) as answer:
            raw = await answer.read()
            return answer.status, json.loads(raw) if answer.content_type == JSON else raw

    async def sampler(self, **kwargs):
        session = (await self.post("create_session", {"tags": []}, **kwargs))[1]["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        return (await self.post("create_sampling_session", body, **kwargs))[1][
            "sampling_session_id"
        ]

    async def draw(self, sampler, seq, **kwargs):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 1, "prompt": prompt}
        return (
            await self.post("asample", body | {"sampling_params": {"max_tokens": 4}}, **kwargs)
        )[0]

    async def poll(self, sampler, seq):
        return await self.post("retrieve_future", {"request_id": ids.future_id(sampler, seq)})

    async def finish(self, sampler):
        body = {"reason": {"type": "success"}, "detail": None}
        await self.post(f"sessions/{ids.session_of(sampler)}/finish", body)


@pytest.fixture
async def open_gateway(bus, tmp_path):
    """Opens gateways that are kept in one process and share nothing but the broker."""
    base = {"name": MODEL, "vocab_size": 256, "context_length": 64, "tokenizer_id": "t"}
    for role in ("trainer", "sampler"):
        key = f"{ids.pool_token(MODEL)}-{role}"
        await bus.table(SERVED).put(key, ServedModel(role=role, **base))
    async with AsyncExitStack() as opened:

        async def make():
            return await opened.enter_async_context(running(bus, tmp_path))

        yield make


@asynccontextmanager
async def running(bus, folder):
    config = GatewayConfig(
        long_poll_s=0.2, recheck_s=0.1, sampling_share=SHARE, max_unfinished=MOST
    )
    gateway = Gateway.build(config, bus, [KEY], Seals(bus, Config(data_dir=folder)))
    await gateway.start()
    runner = build_runner(build_app(gateway))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stopping = asyncio.Event()
    watching = asyncio.create_task(gateway.keep_watch(stopping))
    try:
        async with aiohttp.ClientSession() as http:
            yield Front(f"http://127.0.0.1:{runner.addresses[0][1]}", http)
    finally:
        stopping.set()
        await watching
        await runner.cleanup()
        await gateway.close()


async def queued(bus, queue):
    """The numbers of what is on a queue."""
    return sorted(int(subject.rpartition(".")[2]) for subject in await bus.subjects(queue))


async def finish_one(bus):
    """What a sampler does with the oldest it has; its number."""
    seq = (await queued(bus, SAMPLES))[0]
    (subject,) = (s for s in await bus.subjects(SAMPLES) if s.endswith(f".{seq}"))
    tokens = SAMPLES.tokens(subject)
    sampler = ids.of_token(tokens["sampler"])
    request_id = ids.future_id(sampler, seq)
    await bus.results.put_first(sampler, seq, SampleDone(request_id=request_id, sequences=()))
    await bus.withdraw(SAMPLES, **tokens)
    await bus.emit(SAMPLE_READY, SampleReady(request_id=request_id))
    return seq


async def until(condition, what):
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.01)
    return what


async def test_what_an_owner_has_unfinished_counts_at_all_gateways(bus, open_gateway):
    gateways = await open_gateway(), await open_gateway()
    sampler = await gateways[0].sampler()
    taken = [await gateways[seq % 2].draw(sampler, seq) for seq in range(MOST)]

    assert taken == [200] * MOST
    assert [await one.draw(sampler, MOST) for one in gateways] == [429, 429]
    assert await (await open_gateway()).draw(sampler, MOST) == 429  # it has heard of none of them

    await finish_one(bus)

    async def is_taken():
        return await gateways[1].draw(sampler, MOST) == 200

    await until(is_taken, "room")


async def test_samples_over_the_share_wait_in_order_and_are_told_their_place(bus, open_gateway):
    here, there = await open_gateway(), await open_gateway()
    alive = ServiceAlive(service="sampler", instance="s", version="0", base_models=(MODEL,))
    await bus.emit(SERVICE_ALIVE, alive)
    sampler = await here.sampler()
    for seq in range(MOST):
        await (here, there)[seq % 2].draw(sampler, seq)
    first, last = await there.poll(sampler, 0), await there.poll(sampler, MOST - 1)
    again = [await here.draw(sampler, seq) for seq in (0, MOST - 1)]

    assert await queued(bus, SAMPLES) == [0, 1]
    assert await queued(bus, HELD) == [2, 3, 4]
    assert again == [200, 200]
    assert (first[0], first[1]["queue_state"]) == (408, "active")
    assert (last[0], last[1]["queue_state"]) == (408, "paused_rate_limit")
    assert "2 samples of this key are being worked on" in last[1]["queue_state_reason"]
    assert "2 of its others come before this one" in last[1]["queue_state_reason"]

    finished = []
    for _ in range(MOST):

        async def is_there():
            return bool(await queued(bus, SAMPLES))

        await until(is_there, "one that was let go")
        finished.append(await finish_one(bus))
        # Two gateways that see the same room may each let one go.
        assert len(await queued(bus, SAMPLES)) <= SHARE + 1

    assert finished == list(range(MOST))
    assert await queued(bus, HELD) == []
    assert {(await here.poll(sampler, seq))[0] for seq in range(MOST)} == {200}


async def test_samples_of_a_session_that_is_over_are_cancelled(bus, open_gateway):
    here, there = await open_gateway(), await open_gateway()
    over, going_on = await here.sampler(), await here.sampler()
    for seq in range(3):
        await here.draw(over, seq)
    await there.draw(going_on, 3)
    await there.finish(over)

    async def is_cancelled():
        return await queued(bus, SAMPLES) == [3] and not await queued(bus, HELD)

    await until(is_cancelled, "the end of what nobody waits for")
    answers = [await here.poll(over, seq) for seq in range(3)]
    assert {status for status, _ in answers} == {200}
    assert {body["error"] for _, body in answers} == {"cancelled: its session has ended"}


async def test_a_key_has_limits_of_its_own(bus, open_gateway, tmp_path):
    async def keys(*args):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tinsmith", "keys", *args,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={
                "PATH": os.environ["PATH"],
                "TINSMITH_NATS_URL": bus._config.url,
                "TINSMITH_DATA_DIR": str(tmp_path / "data"),
            },
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        return out.decode().strip()

    gateway = await open_gateway()
    key = await keys("create", "alice", "--max-unfinished", "1")
    sampler = await gateway.sampler(key=key)
    first = [await gateway.draw(sampler, seq, key=key) for seq in (0, 1)]
    told = await keys("limit", key, "--max-unfinished", "3", "--sampling-share", "1")

    async def is_taken():
        return await gateway.draw(sampler, 1, key=key) == 200

    await until(is_taken, "the new limit")
    assert first == [200, 429]
    assert told.endswith("of alice: 3 / 1")
    assert "3 / 1" in await keys("list")
    assert (await queued(bus, SAMPLES), await queued(bus, HELD)) == ([0], [1])

"""Rows of the SGLang engine that are given up, and rows whose server is lost under them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.sglang.engines import MAX_ROWS, Renewed, engine_on
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.sampler.oracles import adapter_files, save_adapter

from tinsmith.errors import Gone, ServerError
from tinsmith_sampler.sglang.engine import ATTEMPTS
from tinsmith_sampler.sglang.watching import parsed

LONG = 1500


async def until(condition):
    async with asyncio.timeout(120):
        while not await condition():
            await asyncio.sleep(0.05)


async def running_in(client):
    return parsed(await client.metrics())["sglang_running"]


async def begun(engine, count, **fields):
    """Rows that draw for long, each of which has told of a token."""
    told = asyncio.Queue()
    loop = asyncio.get_running_loop()
    rows = [
        replace(
            row(prompt=prompt(20), seed=seed, max_tokens=LONG, request_id=f"long{seed}", **fields),
            index=seed,
            tell=lambda one: loop.call_soon_threadsafe(told.put_nowait, one.index),
        )
        for seed in range(count)
    ]
    tasks = [asyncio.create_task(engine.generate(one)) for one in rows]
    seen = set()
    async with asyncio.timeout(120):
        while len(seen) < count:
            seen.add(await told.get())
    return rows, tasks


async def test_an_aborted_request_ends_in_the_server_too(engine, client):
    _, tasks = await begun(engine, 4)
    for seed in range(4):
        engine.abort(f"long{seed}")

    for task in tasks:
        with pytest.raises(Gone, match="was aborted"):
            await task
    await until(lambda: _none_runs(client))
    assert engine.load().running == 0


async def test_a_cancelled_row_ends_in_the_server_and_no_other(engine, client):
    """Its name there is how the name of no other row begins, of eleven of one request."""
    rows = [row(prompt=prompt(20), seed=seed, max_tokens=400) for seed in range(2)]
    first, other = [asyncio.create_task(engine.generate(one)) for one in rows]
    await until(lambda: _some_run(client))
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first

    assert first.cancelled()
    assert len((await other).tokens) == 400


async def test_rows_that_lose_their_server_begin_anew_and_draw_the_same(server, model, tmp_path):
    """Their adapter is loaded again too. Rows that wait for a seat are among them."""
    files = adapter_files(save_adapter(model, tmp_path, seed=1))
    made = []
    async with engine_on(
        server, new_server=lambda _: made.append(Renewed(server)) or made[0]
    ) as engine:
        await engine.load_adapter("a", files)
        short = [
            row(prompt=prompt(20), seed=seed, adapter=name, max_tokens=24)
            for seed in range(3 * MAX_ROWS)
            for name in ("a", None)
        ]
        before = await asyncio.gather(*map(engine.generate, short))
        tasks = [asyncio.create_task(engine.generate(one)) for one in short]
        asked = scoring(prompt(60), adapter="a")
        scored = asyncio.create_task(engine.score(asked))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        lost = made[0].client
        await made[0].renew()
        after = await asyncio.gather(*tasks)
        await scored

        assert made[0].client is not lost
        assert [one.tokens.tolist() for one in after] == [one.tokens.tolist() for one in before]


async def test_a_row_that_always_loses_its_server_is_given_up(server):
    made = []
    async with engine_on(
        server, new_server=lambda _: made.append(Renewed(server)) or made[0]
    ) as engine:
        told = asyncio.Queue()
        asked = replace(row(prompt=prompt(20), max_tokens=LONG), tell=told.put_nowait)
        task = asyncio.create_task(engine.generate(asked))
        for _ in range(ATTEMPTS):
            while (await asyncio.wait_for(told.get(), 120)).start:
                pass  # told by the start before
            await made[0].renew()

        with pytest.raises(ServerError, match="failed 4 times under this request"):
            await asyncio.wait_for(task, 120)


async def test_closing_fails_what_is_pending(server):
    async with engine_on(server) as engine:
        _, tasks = await begun(engine, 2)

    for task in tasks:
        with pytest.raises(ServerError, match="shutting down"):
            await task
    with pytest.raises(ServerError, match="shutting down"):
        await engine.generate(row())
    await engine.wait_ended()


async def _none_runs(client):
    return await running_in(client) == 0


async def _some_run(client):
    return await running_in(client) > 0

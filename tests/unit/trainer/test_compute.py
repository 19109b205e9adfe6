"""The torch thread: turns, errors, and an event loop that stays awake."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinsmith_trainer.compute import Compute


@pytest.fixture
async def compute():
    compute = Compute()
    serving = asyncio.create_task(compute.serve())
    yield compute
    serving.cancel()
    compute.close()


async def test_the_event_loop_runs_while_the_thread_computes(compute):
    """Otherwise the broker's pings go unanswered and it drops the connection."""
    release = threading.Event()
    running = asyncio.create_task(compute.run("m", lambda: release.wait(30)))
    for _ in range(100):
        await asyncio.sleep(0)
    release.set()

    assert await running


async def test_everything_runs_on_one_thread(compute):
    threads = {await compute.run(model, threading.get_ident) for model in "abc"}

    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_an_error_reaches_the_one_who_waits_and_the_next_turn_runs(compute):
    with pytest.raises(ZeroDivisionError):
        await compute.run("m", lambda: 1 // 0)

    assert await compute.run("m", lambda: 7) == 7


async def test_a_turn_nobody_waits_for_any_more_is_skipped(compute):
    release, ran = threading.Event(), []
    first = asyncio.create_task(compute.run("a", lambda: release.wait(30)))
    second = asyncio.create_task(compute.run("b", lambda: ran.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    release.set()
    await first
    await compute.run("c", lambda: None)

    assert ran == []

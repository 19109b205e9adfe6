"""The torch thread: turns, errors, and an event loop that stays awake."""

from __future__ import annotations

import asyncio
import threading
from typing import NamedTuple

import pytest

from tinsmith_trainer.compute import Compute
from tinsmith_trainer.scheduler import QUANTUM


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


async def test_what_is_for_idle_times_waits_for_everybody_else(compute):
    release, ran = threading.Event(), []
    first = asyncio.create_task(compute.run("a", lambda: release.wait(30)))
    await asyncio.sleep(0)
    idle = asyncio.create_task(compute.run_idle(lambda: ran.append("idle")))
    await asyncio.sleep(0)
    others = [asyncio.create_task(compute.run(m, lambda m=m: ran.append(m))) for m in "bcb"]
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(first, idle, *others)

    assert ran[-1] == "idle"
    assert sorted(ran[:-1]) == ["b", "b", "c"]


async def test_what_is_for_idle_times_runs_on_the_same_thread_and_fails_alone(compute):
    with pytest.raises(ZeroDivisionError):
        await compute.run_idle(lambda: 1 // 0)

    threads = {await compute.run("m", threading.get_ident)}
    assert await compute.run_idle(threading.get_ident) in threads


class Rows(NamedTuple):
    """What a pass is made of, as far as turns go."""

    tokens: int


def passes(name, count, made, *, tokens=100):
    """An op of so many passes that notes each of them, and returns its name."""
    for n in range(count):
        yield Rows(tokens)
        made.append((name, n))
    return name


async def test_an_op_of_many_passes_gives_what_it_returns(compute):
    made = []

    assert await compute.run_passes("m", passes("op", 3, made)) == "op"
    assert made == [("op", 0), ("op", 1), ("op", 2)]


async def test_an_error_between_passes_is_the_ops(compute):
    def fails():
        yield Rows(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await compute.run_passes("m", fails())


async def test_a_small_op_waits_for_a_quantum_of_a_large_one(compute):
    """Counted in passes: the flood has twenty ops of twenty passes under way."""
    made, release = [], threading.Event()
    gate = asyncio.create_task(compute.run("gate", lambda: release.wait(30)))

    async def flood():
        for _ in range(20):
            await compute.run_passes("flood", passes("flood", 20, made))

    flooding = asyncio.create_task(flood())
    small = asyncio.create_task(compute.run_passes("small", passes("small", 2, made, tokens=10)))
    await asyncio.sleep(0)
    release.set()
    await small
    before = made.index(("small", 1))
    flooding.cancel()
    await asyncio.gather(gate, flooding, return_exceptions=True)

    assert before <= QUANTUM / 100 + 2


async def test_many_small_ops_get_their_share_beside_large_ones(compute):
    """Ops come one after another, as from an owner, and the shares are in tokens all the same."""
    made, release = [], threading.Event()
    gate = asyncio.create_task(compute.run("gate", lambda: release.wait(30)))

    async def client(name, tokens):
        while True:
            await compute.run_passes(name, passes(name, 1, made, tokens=tokens))

    clients = [asyncio.create_task(client(*c)) for c in (("large", 1000), ("small", 50))]
    await asyncio.sleep(0)
    release.set()
    await gate
    while len(made) < 400:
        await asyncio.sleep(0)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    names = [name for name, _ in made[:400]]

    # Of every op, 16 tokens are for reading it.
    shares = (names.count("large") * 1016, names.count("small") * 66)
    assert abs(shares[0] - shares[1]) <= QUANTUM + 2 * 1016


async def test_who_waits_is_told_its_place(compute):
    release = threading.Event()
    running = asyncio.create_task(compute.run("a", lambda: release.wait(30), cost=10))
    await asyncio.sleep(0)
    while compute.places():
        await asyncio.sleep(0)
    waiting = [asyncio.create_task(compute.run(m, int, cost=100)) for m in ("b", "c")]
    await asyncio.sleep(0)
    places = {model: (place.turns, place.tokens) for model, place in compute.places().items()}
    release.set()
    await asyncio.gather(running, *waiting)

    assert places == {"b": (0, 0), "c": (1, 100)}

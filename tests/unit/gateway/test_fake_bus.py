"""The stand-in keeps the promises of the real bus that the gateway relies on."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith import ids
from tinsmith.errors import BrokerUnavailable, Busy
from tinsmith.messages import ops, sampling, services
from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith.messages.registry import Run, Session
from tinsmith.messages.table import OP_DONE, OPS, RUNS, SESSION_ALIVE, SESSIONS

SESSION = ids.new_session_id()
MODEL = ids.model_id(SESSION, 0)
TOKENS = {"model": ids.token(MODEL), "seq": "1"}


@pytest.fixture(
    params=["in memory", pytest.param("real broker", marks=pytest.mark.integration)], scope="module"
)
def kind(request):
    return request.param


@pytest.fixture
def either(kind, request):
    """The stand-in, then the real thing: the same tests hold for both."""
    return request.getfixturevalue("fake" if kind == "in memory" else "bus")


def op(seq=1, lr=1.0):
    return ops.Op(model_id=MODEL, seq=seq, body=OptimStep(learning_rate=lr))


def run(rank):
    return Run(
        model_id=MODEL,
        session_id=SESSION,
        owner="o",
        created_ns=1,
        base_model="m",
        lora=LoraShape(rank=rank),
    )


async def test_a_table_returns_what_was_put(either):
    await either.table(RUNS).put("k", run(8))

    assert await either.table(RUNS).get("k") == run(8)


async def test_a_table_knows_nothing_of_other_keys(either):
    assert await either.table(RUNS).get("other") is None


async def test_the_first_to_create_an_entry_wins(either):
    assert await either.table(RUNS).create("c", run(8)) == run(8)
    assert await either.table(RUNS).create("c", run(16)) == run(8)


async def test_a_watch_delivers_what_is_there_before_it_returns(either):
    await either.table(RUNS).put("w", run(8))
    seen = {}

    watch = await either.table(RUNS).watch(seen.__setitem__)

    assert seen["w"] == run(8)
    await watch.close()


async def test_a_watch_delivers_changes_and_deletions(either):
    changes = asyncio.Queue()
    watch = await either.table(SESSIONS).watch(lambda *change: changes.put_nowait(change))
    session = Session(session_id=SESSION, owner="o", created_ns=1)

    await either.table(SESSIONS).put("s", session)
    await either.table(SESSIONS).delete("s")

    assert [await changes.get(), await changes.get()] == [("s", session), ("s", None)]
    await watch.close()


async def test_an_op_is_queued_once(either):
    await either.enqueue(OPS, op(), **TOKENS)
    await either.enqueue(OPS, op(lr=2.0), **TOKENS)

    assert await either.is_queued(OPS, **TOKENS)
    assert not await either.is_queued(OPS, model=TOKENS["model"], seq="2")


async def test_an_event_reaches_its_listeners_until_they_close(either):
    heard = asyncio.Queue()
    subscription = await either.listen(SESSION_ALIVE, heard.put_nowait)
    alive = services.SessionAlive(session_id=SESSION)

    await either.emit(SESSION_ALIVE, alive)

    assert await heard.get() == alive
    await subscription.close()


async def test_a_sampling_result_is_stored_once(either):
    sampler = ids.sampler_id(SESSION, 0)
    first, second = (sampling.SampleDone(request_id="r", plane=plane) for plane in "ab")

    await either.results.put_first(sampler, 3, first)
    await either.results.put_first(sampler, 3, second)

    assert await either.results.get(sampler, 3) == first
    assert await either.results.get(sampler, 4) is None


async def test_there_is_no_record_of_an_op_that_was_never_done(either):
    assert await either.log.get(MODEL, 7) is None


async def test_a_finished_op_leaves_the_queue_and_has_its_record(fake):
    heard = []
    await fake.listen(OP_DONE, heard.append)
    await fake.enqueue(OPS, op(), **TOKENS)

    await fake.finish_op(await fake.take(OPS, set()), ops.OptimStepDone(metrics={"a": 1.0}))

    record = await fake.log.get(MODEL, 1)
    assert await fake.log.result(record) == ops.OptimStepDone(metrics={"a": 1.0})
    assert (await fake.log.op(record)).body == OptimStep(learning_rate=1.0)
    assert not await fake.is_queued(OPS, **TOKENS)
    assert heard == [ops.OpDone(model_id=MODEL, seq=1)]


async def test_taking_waits_for_what_is_enqueued_later(fake):
    taken = asyncio.create_task(fake.take(OPS, set()))
    await fake.enqueue(OPS, op(), **TOKENS)

    assert await taken == op()


async def test_a_full_queue_is_busy_for_new_work_only(fake):
    fake.capacity = 1
    await fake.enqueue(OPS, op(), **TOKENS)

    await fake.enqueue(OPS, op(), **TOKENS)
    with pytest.raises(Busy):
        await fake.enqueue(OPS, op(2), model=TOKENS["model"], seq="2")


async def test_a_broker_that_is_away_says_so(fake):
    fake.is_connected = False

    with pytest.raises(BrokerUnavailable):
        await fake.log.get(MODEL, 1)

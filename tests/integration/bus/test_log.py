"""The command log: ordered, chained, and writable by one owner at a time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from blake3 import blake3

from tinsmith import ids
from tinsmith.bus import Encoded
from tinsmith.bus.claims import INLINE_BYTES
from tinsmith.errors import Fenced
from tinsmith.messages import ops
from tinsmith.messages.base import GENESIS, Tensor, encode

pytestmark = pytest.mark.integration

MODEL = ids.model_id(ids.new_session_id(), 0)
OP = encode(ops.Op(model_id=MODEL, seq=1, body=ops.OptimStep()))
DONE = ops.OptimStepDone(metrics={"grad_norm": 1.0})


async def test_a_committed_op_is_found_with_its_result(bus):
    writer = await bus.log.take(MODEL, "trainer-a")
    await writer.commit(1, Encoded(OP), DONE)
    record = await bus.log.get(MODEL, 1)

    assert await bus.log.result(record) == DONE
    assert (await bus.log.op(record)).body == ops.OptimStep()


async def test_an_op_that_has_not_happened_has_no_record(bus):
    await bus.log.take(MODEL, "trainer-a")

    assert await bus.log.get(MODEL, 1) is None


async def test_entries_are_chained_by_digest(bus):
    writer = await bus.log.take(MODEL, "trainer-a")
    for seq in (1, 2, 3):
        await writer.commit(seq, Encoded(OP), DONE)
    entries = [entry async for entry in bus.log.entries(MODEL)]

    assert entries[0].prev_blake3 == GENESIS
    for before, after in pairwise(entries):
        assert after.prev_blake3 == blake3(encode(before)).hexdigest()


async def test_a_new_owner_fences_the_old_one(bus):
    old = await bus.log.take(MODEL, "trainer-a")
    new = await bus.log.take(MODEL, "trainer-b")

    assert new.epoch == old.epoch + 1
    with pytest.raises(Fenced, match="another owner"):
        await old.commit(1, Encoded(OP), DONE)
    await new.commit(1, Encoded(OP), DONE)


async def test_logs_of_two_models_do_not_fence_each_other(bus):
    other = ids.model_id(ids.new_session_id(), 0)
    first = await bus.log.take(MODEL, "trainer-a")
    await bus.log.take(other, "trainer-b")
    await first.commit(1, Encoded(OP), DONE)

    assert await bus.log.get(other, 1) is None


async def test_a_large_result_is_kept_by_reference(bus):
    result = ops.ForwardBackwardDone(
        logprobs=(Tensor("float32", (INLINE_BYTES,), bytes(4 * INLINE_BYTES)),), metrics={}
    )
    writer = await bus.log.take(MODEL, "trainer-a")
    await writer.commit(1, Encoded(OP), result)
    record = await bus.log.get(MODEL, 1)

    assert record.result is None
    assert await bus.log.result(record) == result


async def test_a_commit_whose_acknowledgement_was_lost_counts_once(bus):
    """The broker checks the expected sequence first, so the retry of our own append is refused."""
    writer = await bus.log.take(MODEL, "trainer-a")
    tip = writer._chain.tip
    await writer.commit(1, Encoded(OP), DONE)
    writer._chain.tip = tip  # as if the answer had never come
    await writer.commit(1, Encoded(OP), DONE)
    entries = [entry async for entry in bus.log.entries(MODEL)]

    assert [type(entry).__name__ for entry in entries] == ["Owned", "Record"]


async def test_commits_go_on_over_kills_of_the_broker(broker, bus):
    writer = await bus.log.take(MODEL, "trainer-a")
    for seq in range(1, 31):
        if seq % 10 == 0:
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.restart)
        await writer.commit(seq, Encoded(OP), DONE)
    entries = [entry async for entry in bus.log.entries(MODEL)]

    assert [e.seq for e in entries if isinstance(e, ops.Record)] == list(range(1, 31))


async def test_the_log_refuses_to_give_up_an_entry(bus):
    await bus.log.take(MODEL, "trainer-a")

    with pytest.raises(Exception, match="delete"):
        await bus._connection[1].delete_msg("TS_LOG", 1)


async def test_the_newest_saved_state_is_found_and_reading_starts_behind_it(bus):
    writer = await bus.log.take(MODEL, "trainer-a")
    for seq in range(1, 6):
        await writer.commit(seq, Encoded(OP), DONE)
        if seq in (2, 4):
            await writer.save_state(seq, {}, state_blake3=f"after {seq}")
    saved = await bus.log.newest_state(MODEL)
    entries = [entry async for entry in bus.log.entries(MODEL, from_op=saved.seq + 1)]

    assert (saved.seq, saved.state_blake3) == (4, "after 4")
    assert [entry.seq for entry in entries] == [5]


async def test_appends_of_one_owner_take_turns(bus):
    writer = await bus.log.take(MODEL, "trainer-a")
    saves = [writer.save_state(seq, {}, state_blake3="") for seq in range(8)]
    await asyncio.gather(writer.commit(1, Encoded(OP), DONE), *saves)
    entries = [entry async for entry in bus.log.entries(MODEL)]

    for before, after in pairwise(entries):
        assert after.prev_blake3 == blake3(encode(before)).hexdigest()
    assert len(entries) == 10

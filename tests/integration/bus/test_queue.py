"""Durable work: enqueued once, delivered until acknowledged, whatever the broker does."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from tinsmith import ids
from tinsmith.bus import connection
from tinsmith.bus.claims import INLINE_BYTES
from tinsmith.bus.wire import Rejected
from tinsmith.errors import BlobMissing, BrokerUnavailable, Busy, Fenced
from tinsmith.messages import ops, table
from tinsmith.messages.base import Tensor

pytestmark = pytest.mark.integration

MODEL = ids.model_id(ids.new_session_id(), 0)
TOKEN = ids.token(MODEL)


def op(seq, body=None):
    return ops.Op(model_id=MODEL, seq=seq, body=body or ops.OptimStep())


async def put(bus, seq, body=None):
    await bus.enqueue(table.OPS, op(seq, body), model=TOKEN, seq=str(seq))


def work(bus, *, ack_wait_s=30.0, window=16, name=f"model-{TOKEN}"):
    return bus.work(table.OPS, name, window=window, ack_wait_s=ack_wait_s, model=TOKEN, seq="*")


async def take(bus, n, **options):
    taken = []
    async with aclosing(work(bus, **options).deliveries()) as deliveries:
        async for delivery in deliveries:
            taken.append(delivery)
            if len(taken) == n:
                break
    return taken


async def test_work_is_delivered_as_it_was_put(bus):
    await put(bus, 1)
    (delivery,) = await take(bus, 1)

    assert delivery.message == op(1)
    assert delivery.attempts == 1


async def test_a_repeat_while_queued_is_the_same_work(bus):
    for _ in range(3):
        await put(bus, 1)
    await put(bus, 2)
    taken = await take(bus, 2)

    assert [d.message.seq for d in taken] == [1, 2]


async def test_acknowledged_work_is_gone(bus):
    await put(bus, 1)
    (delivery,) = await take(bus, 1)
    await delivery.ack()
    await put(bus, 2)
    (second,) = await take(bus, 1)

    assert second.message.seq == 2


async def test_work_that_is_done_while_it_is_sent_again_is_no_full_queue(bus, monkeypatch):
    publish = connection.publish

    async def refused_and_then_done(*args, **options):
        try:
            return await publish(*args, **options)
        except Rejected:
            await bus.withdraw(table.OPS, model=TOKEN, seq="1")
            raise

    await put(bus, 1)
    monkeypatch.setattr(connection, "publish", refused_and_then_done)

    other = op(1, ops.OptimStep(learning_rate=1.0))
    assert not await bus.enqueue(table.OPS, other, model=TOKEN, seq="1")
    assert not await bus.is_queued(table.OPS, model=TOKEN, seq="1")


async def test_is_queued_tells_waiting_work_from_none(bus):
    await put(bus, 7)

    assert await bus.is_queued(table.OPS, model=TOKEN, seq="7")
    assert not await bus.is_queued(table.OPS, model=TOKEN, seq="8")


async def test_a_large_body_travels_through_the_blob_store(bus):
    tokens = Tensor("int32", (INLINE_BYTES,), bytes(4 * INLINE_BYTES))
    body = ops.ForwardBackward(data=(ops.Datum(tokens=tokens, inputs={}),), loss_fn="x")
    await put(bus, 1, body)
    (delivery,) = await take(bus, 1)

    assert delivery.message.body == body
    assert delivery.ref is not None


async def test_work_given_back_comes_again(bus):
    await put(bus, 1)
    async with aclosing(work(bus).deliveries()) as deliveries:
        first = await anext(deliveries)
        await first.give_back()
        second = await anext(deliveries)

    assert second.message.seq == 1
    assert second.attempts == 2


async def test_work_in_hand_outlives_its_acknowledgement_time(bus):
    """A long step keeps its message: only new work may arrive, never the same again."""
    await put(bus, 1)
    async with aclosing(work(bus, ack_wait_s=0.6).deliveries()) as deliveries:
        first = await anext(deliveries)
        started = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < started + 2.0:
            await bus.is_queued(table.OPS, model=TOKEN, seq="1")  # the loop stays alive
        await put(bus, 2)
        second = await anext(deliveries)

    assert (first.message.seq, second.message.seq) == (1, 2)


async def test_work_let_go_comes_again(bus):
    await put(bus, 1)
    async with aclosing(work(bus, ack_wait_s=0.6).deliveries()) as deliveries:
        (await anext(deliveries)).let_go()
        again = await anext(deliveries)

    assert again.attempts == 2


async def test_waiting_for_work_survives_a_restart_of_the_broker(broker, bus):
    async with aclosing(work(bus).deliveries()) as deliveries:
        waiting = asyncio.ensure_future(anext(deliveries))
        await bus.is_queued(table.OPS, model=TOKEN, seq="1")  # the consumer is being made
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.restart)
        await put(bus, 1)
        delivery = await asyncio.wait_for(waiting, 20)

    assert delivery.message.seq == 1


async def test_work_put_while_the_broker_is_away_arrives(broker, bus):
    await asyncio.to_thread(broker.kill)
    putting = asyncio.create_task(put(bus, 1))
    await asyncio.to_thread(broker.restart)
    await putting
    (delivery,) = await take(bus, 1)

    assert delivery.message.seq == 1


async def test_putting_work_on_a_dead_broker_fails_with_a_reason(broker, bus, monkeypatch):
    monkeypatch.setattr("tinsmith.bus.wire.PUBLISH_TRY_S", 0.2)
    monkeypatch.setattr("tinsmith.bus.wire.PUBLISH_PATIENCE_S", 0.5)
    await asyncio.to_thread(broker.kill)

    with pytest.raises(BrokerUnavailable, match="is it running"):
        await put(bus, 1)


async def test_a_message_nobody_understands_does_not_block_the_queue(bus):
    unknown = b"\x81\xa1t\xa7martian"
    await bus._connection[1].publish(table.OPS.subject(model=TOKEN, seq="1"), unknown)
    await put(bus, 2)
    (delivery,) = await take(bus, 1)

    assert delivery.message.seq == 2


async def test_a_new_consumer_gets_at_once_what_the_old_one_had_in_hand(bus):
    await put(bus, 1)
    old, new = work(bus, name="model-1"), work(bus, name="model-2")
    async with aclosing(old.deliveries()) as olds, aclosing(new.deliveries()) as news:
        await anext(olds)
        await new.supersede(["model-1"])
        taken = await asyncio.wait_for(anext(news), 5)
        with pytest.raises(Fenced, match="taken over"):
            await asyncio.wait_for(anext(olds), 20)

    assert taken.message.seq == 1


LARGE = ops.ForwardBackward(
    data=(ops.Datum(tokens=Tensor("int32", (INLINE_BYTES,), bytes(4 * INLINE_BYTES)), inputs={}),),
    loss_fn="x",
)


async def test_a_full_queue_is_busy(bus):
    js = bus._connection[1]
    info = await js.stream_info(table.OPS.stream)
    await js.update_stream(info.config.evolve(max_bytes=100))

    with pytest.raises(Busy, match=r"full.*maximum bytes"):
        await put(bus, 1)


async def test_work_whose_bytes_were_shed_is_read_from_the_queue_again(bus):
    await put(bus, 1)
    worklist = work(bus)
    async with aclosing(worklist.taken()) as taken:
        one = await anext(taken)
        assert one.size > 0
        one.shed()

        assert one.size == 0
        assert (await worklist.read(one)).message == op(1)


async def test_work_whose_blob_is_lost_is_given_up_after_some_tries(bus, blobs, monkeypatch):
    monkeypatch.setattr("tinsmith.bus.pull.POSTPONE_S", 0.05)
    await put(bus, 1, LARGE)
    (delivery,) = await take(bus, 1, name="first")
    await bus._connection[1].delete_consumer(table.OPS.stream, "first")
    (Path(blobs.where) / delivery.ref.blake3[:2] / delivery.ref.blake3[2:]).unlink()
    lost = []

    async def on_lost(taken, error):
        lost.append((taken.subject, taken.attempts, error))

    await put(bus, 2)
    async with aclosing(work(bus).deliveries(on_lost)) as deliveries:
        second = await anext(deliveries)
        waiting = asyncio.ensure_future(anext(deliveries))
        async with asyncio.timeout(20):
            while await bus.is_queued(table.OPS, model=TOKEN, seq="1"):
                await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    ((subject, attempts, error),) = lost
    assert second.message.seq == 2
    assert (subject, attempts) == (table.OPS.subject(model=TOKEN, seq="1"), 4)
    assert isinstance(error, BlobMissing)
    assert delivery.ref.blake3 in str(error)

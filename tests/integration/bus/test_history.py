"""Reading a log to its end, whatever becomes of the consumer behind it."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith import ids
from tinsmith.bus import Encoded, history
from tinsmith.errors import BrokerUnavailable
from tinsmith.messages import ops
from tinsmith.messages.base import encode

pytestmark = pytest.mark.integration

MODEL = ids.model_id(ids.new_session_id(), 0)
DONE = ops.OptimStepDone()


async def write(bus, model=MODEL, count=9):
    writer = await bus.log.take(model, "trainer-a")
    for seq in range(count):
        op = ops.Op(model_id=model, seq=seq, body=ops.OptimStep())
        await writer.commit(seq, Encoded(encode(op)), DONE)


async def forget_consumers(bus):
    """As the broker does with one that nobody asks for a while."""
    js = bus._connection[1]
    for consumer in await js.consumers_info("TS_LOG"):
        await js.delete_consumer("TS_LOG", consumer.name)


async def test_a_reader_that_takes_its_time_reads_everything_once(bus, monkeypatch):
    monkeypatch.setattr(history, "BATCH", 2)
    await write(bus)
    seqs = []
    async for entry in bus.log.entries(MODEL, from_op=0):
        seqs.append(entry.seq)
        await forget_consumers(bus)

    assert seqs == list(range(9))


async def test_reading_goes_on_over_a_kill_of_the_broker(broker, bus, monkeypatch):
    monkeypatch.setattr(history, "BATCH", 2)
    await write(bus)
    seqs = []
    async for entry in bus.log.entries(MODEL, from_op=0):
        seqs.append(entry.seq)
        if entry.seq == 4:
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.restart)

    assert seqs == list(range(9))


@pytest.mark.parametrize("batch", [2, 3])
async def test_what_is_deleted_while_it_is_read_is_told_at_once(bus, monkeypatch, batch):
    monkeypatch.setattr(history, "BATCH", batch)
    monkeypatch.setattr(history, "LOOK_S", 0.5)
    await write(bus)
    entries = bus.log.entries(MODEL, from_op=0)
    await anext(entries)
    await bus._connection[1].purge_stream("TS_LOG")
    with pytest.raises(BrokerUnavailable, match="deleted"):
        [entry async for entry in entries]


async def test_stopping_early_leaves_nothing_open(bus, monkeypatch):
    """A subscription with messages in it would hold up the end of the connection for 30 s."""
    monkeypatch.setattr(history, "BATCH", 5)
    await write(bus)
    open_before = set(bus._client._subs)
    entries = bus.log.entries(MODEL)
    await anext(entries)

    assert set(bus._client._subs) == open_before


async def test_a_broker_that_stays_away_is_named(broker, bus, monkeypatch):
    monkeypatch.setattr(history, "BATCH", 2)
    monkeypatch.setattr(history, "SILENCE_S", 0.5)
    monkeypatch.setattr(history, "LOOK_S", 0.2)
    monkeypatch.setattr(history, "READ_PATIENCE_S", 0.5)
    await write(bus)
    entries = bus.log.entries(MODEL, from_op=0)
    await anext(entries)
    await asyncio.to_thread(broker.kill)
    with pytest.raises(BrokerUnavailable):
        [entry async for entry in entries]


async def test_the_models_with_a_log_are_listed_with_its_length(bus):
    other = ids.model_id(ids.new_session_id(), 12)
    await write(bus)
    await write(bus, other, count=2)

    assert await bus.log.models() == sorted([MODEL, other])
    assert [await bus.log.length(model) for model in (MODEL, other)] == [10, 3]


async def test_a_list_over_several_pages_is_put_together(bus, monkeypatch):
    """The broker cuts after 100,000; here it is asked for what comes after the first two."""
    models = [ids.model_id(ids.new_session_id(), 0) for _ in range(5)]
    for model in models:
        await bus.log.take(model, "trainer-a")
    whole = history._page

    async def cut(client, stream, request):
        page = await whole(client, stream, request)
        page.state.subjects = dict(list((page.state.subjects or {}).items())[:2])
        return page

    monkeypatch.setattr(history, "_page", cut)

    assert await bus.log.models() == sorted(models)


async def test_an_entry_that_does_not_follow_is_not_copied(bus):
    await write(bus, count=2)
    data = [data async for _, data in bus.log.stored(MODEL)]
    writer = await bus.log.writer(MODEL)
    with pytest.raises(ValueError, match="does not follow"):
        await writer.copy(data[1])

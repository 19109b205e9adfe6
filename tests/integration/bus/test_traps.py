"""What broke others: slow takers, blocked loops, cancelled waits, links that swallow everything."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing, suppress

import pytest
from tests.integration.bus.link import Link
from tests.integration.bus.test_queue import put, work

from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.messages import ops, table
from tinsmith.messages.base import Tensor

pytestmark = pytest.mark.integration


async def seqs(deliveries, n):
    found = set()
    async with asyncio.timeout(60):
        while len(found) < n:
            delivery = await anext(deliveries)
            found.add(delivery.message.seq)
            await delivery.ack()
    return found


async def test_a_stalled_taker_loses_nothing_however_large(bus):
    """nats-py drops what is over a subscription's pending limit, with only a callback."""
    big = Tensor("int32", (100_000,), bytes(400_000))
    body = ops.ForwardBackward(data=(ops.Datum(tokens=big, inputs={}),), loss_fn="x")
    async with aclosing(work(bus, window=300).deliveries()) as deliveries:
        first = asyncio.ensure_future(anext(deliveries))
        for seq in range(200):
            await put(bus, seq, body)
        await (await first).ack()

        assert await seqs(deliveries, 199) == set(range(200)) - {(await first).message.seq}


async def test_cancelled_waits_swallow_no_message(bus):
    rng = random.Random(0)
    worklist = work(bus, ack_wait_s=1.0)
    for seq in range(40):
        await put(bus, seq)
        async with aclosing(worklist.deliveries()) as deliveries:
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.02):
                    delivery = await anext(deliveries)
                    delivery.let_go()
    async with aclosing(worklist.deliveries()) as deliveries:
        assert await seqs(deliveries, 40) == set(range(40))


async def test_a_blocked_event_loop_loses_no_work(bus):
    for seq in range(20):
        await put(bus, seq)
    async with aclosing(work(bus, ack_wait_s=1.0).deliveries()) as deliveries:
        await (await anext(deliveries)).ack()
        time.sleep(3.0)  # noqa: ASYNC251 - what torch on the loop would do

        assert len(await seqs(deliveries, 19)) == 19


async def test_a_cut_connection_comes_back_by_itself(broker, blobs):
    async with (
        Link.to(broker.url) as link,
        Bus.connect(BusConfig(url=link.url), name="cut", blobs=blobs) as bus,
    ):
        await bus.ensure()
        link.cut()
        await put(bus, 1)

        assert await bus.is_queued(table.OPS, model="*", seq="1")


async def test_a_link_that_swallows_everything_is_noticed_and_left(broker, blobs, monkeypatch):
    """Without pings of its own the client would wait for minutes."""
    monkeypatch.setattr("tinsmith.bus.connection.PING_INTERVAL_S", 1)
    async with (
        Link.to(broker.url) as link,
        Bus.connect(BusConfig(url=link.url), name="hole", blobs=blobs) as bus,
    ):
        await bus.ensure()
        link.swallow()
        async with asyncio.timeout(20):
            while bus.is_connected:
                await asyncio.sleep(0.05)
        link.heal()
        await put(bus, 1)

        assert await bus.is_queued(table.OPS, model="*", seq="1")


async def test_a_dead_broker_ends_no_wait_for_ever(broker, bus, monkeypatch):
    monkeypatch.setattr("tinsmith.bus.wire.READ_PATIENCE_S", 0.5)
    await asyncio.to_thread(broker.kill)

    with pytest.raises(Exception, match="broker did not answer"):
        await bus.is_queued(table.OPS, model="*", seq="1")

"""Work in shares: whoever prefers a share gets its work, and another when that one does not ask."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from tests.integration.bus.link import Link

from tinsmith import ids
from tinsmith.bus import HIGHEST, Bus, Wish
from tinsmith.config import BusConfig
from tinsmith.messages import sampling, table

pytestmark = pytest.mark.integration

SAMPLER = ids.sampler_id(ids.new_session_id(), 0)
POOL = ids.pool_token("tiny/llama")
SHARES = ("0", "1", "2", "3")
PATIENCE_S = 60
MANY = 100


def sample(seq):
    request_id = ids.future_id(SAMPLER, seq)
    place = {"request_id": request_id, "sampler_id": SAMPLER, "seq": seq}
    return sampling.Sample(base_model="tiny/llama", prompt=b"\0\0\0\0", **place)


async def put(bus, seq, share):
    tokens = {"pool": POOL, "share": share, "sampler": ids.token(SAMPLER), "seq": str(seq)}
    await bus.enqueue(table.SAMPLES, sample(seq), **tokens)


class Taker:
    """Takes what it has room for, and keeps it until it is told to finish some."""

    def __init__(self, bus, name, priorities, *, room=MANY, ack_wait_s=30.0):
        self.name = name
        self.priorities = priorities
        self.room = room
        self.held = {}
        self.changed = asyncio.Condition()
        self.work = bus.shared_work(
            table.SAMPLES, f"pool-{POOL}", self.wish,
            window=1000, ack_wait_s=ack_wait_s, pool=POOL, sampler="*", seq="*",
        )  # fmt: skip

    def wish(self):
        return Wish(self.room - len(self.held), self.priorities)

    @property
    def numbers(self):
        return sorted(self.held)

    async def run(self):
        async with self.work.kept_alive(), aclosing(self.work.taken()) as taken:
            async for one in taken:
                delivery = await self.work.opened(one)
                async with self.changed:
                    self.held[delivery.message.seq] = delivery
                    self.changed.notify_all()
            # Stopped: what is held is ours until it is finished.
            await self.until(lambda: not self.held)

    async def finish(self, *numbers):
        for number in numbers:
            await self.held[number].ack()
        async with self.changed:
            for number in numbers:
                del self.held[number]
            self.changed.notify_all()
        self.work.wish_changed()

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)

    async def is_waiting(self, *shares):
        """Its requests for these shares are at the broker."""
        async with asyncio.timeout(PATIENCE_S):
            while not all(share in self.work._polls for share in shares):
                await asyncio.sleep(0.01)
            await self.work._client.flush()


@pytest.fixture
async def taking():
    """Starts takers; ``async with`` to have one end before the test does."""

    @asynccontextmanager
    async def start(*args, **options):
        taker = Taker(*args, **options)
        running = asyncio.create_task(taker.run())
        try:
            yield taker
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async with AsyncExitStack() as stack:

        async def make(*args, **options):
            taker = await stack.enter_async_context(start(*args, **options))
            await taker.is_waiting(*taker.priorities)
            return taker

        make.ending = start
        yield make


def all_at(priority):
    return dict.fromkeys(SHARES, priority)


async def test_a_share_goes_to_who_prefers_it(bus, taking):
    one = await taking(bus, "one", {"0": HIGHEST, "1": HIGHEST, "2": 1, "3": 1})
    two = await taking(bus, "two", {"0": 1, "1": 1, "2": HIGHEST, "3": HIGHEST})
    for seq in range(8):
        await put(bus, seq, SHARES[seq % 4])
        taker, count = (one if seq % 4 < 2 else two), seq + 1
        await taker.until(lambda count=count: len(one.held) + len(two.held) == count)

    assert (one.numbers, two.numbers) == ([0, 1, 4, 5], [2, 3, 6, 7])


async def test_who_has_no_room_is_passed_over(bus, taking):
    full = await taking(bus, "full", all_at(HIGHEST), room=2)
    other = await taking(bus, "other", all_at(3))
    for seq in range(MANY):
        await put(bus, seq, SHARES[seq % 4])
    await other.until(lambda: len(other.held) >= MANY - 2)

    assert len(full.held) <= 2
    assert sorted(full.numbers + other.numbers) == list(range(MANY))


async def test_with_little_room_all_shares_are_emptied(bus, taking):
    for seq in range(MANY):
        await put(bus, seq, SHARES[seq % 4 if seq < 40 else 3])
    async with taking.ending(bus, "one", {"0": HIGHEST, "1": 1, "2": 1, "3": 4}, room=1) as taker:
        done = []
        for _ in range(MANY):
            await taker.until(lambda: taker.held)
            assert len(taker.held) == 1
            done += taker.numbers
            await taker.finish(*taker.numbers)

    assert sorted(done) == list(range(MANY))
    assert await bus.subjects(table.SAMPLES) == set()


async def test_no_share_waits_for_ever_for_one_that_is_preferred(bus, taking):
    await put(bus, 0, "3")
    for seq in range(1, MANY):
        await put(bus, seq, "0")
    async with taking.ending(bus, "one", {"0": HIGHEST, "3": 4}, room=1) as taker:
        done = []
        while 0 not in done:
            await taker.until(lambda: taker.held)
            done += taker.numbers
            await taker.finish(*taker.numbers)

    assert len(done) < MANY / 2


async def test_one_that_stops_gives_back_and_keeps_what_it_has_begun(bus, taking):
    stopping = await taking(bus, "stopping", all_at(HIGHEST), ack_wait_s=2.0)
    await put(bus, 0, "0")
    await stopping.until(lambda: stopping.held)
    stopping.work.stop()
    other = await taking(bus, "other", all_at(5), ack_wait_s=2.0)
    for seq in range(1, 9):
        await put(bus, seq, SHARES[seq % 4])
    await other.until(lambda: len(other.held) == 8)
    # By the time that a message comes again whose taker is silent, so would the first one have.
    other.held.pop(8).let_go()
    await other.until(lambda: 8 in other.held)

    assert (stopping.numbers, other.numbers) == ([0], list(range(1, 9)))


async def test_a_connection_that_breaks_holds_up_nothing(broker, blobs, bus, taking):
    async with (
        Link.to(broker.url) as link,
        Bus.connect(BusConfig(url=link.url), name="cut", blobs=blobs) as its_bus,
        taking.ending(its_bus, "cut", all_at(HIGHEST), ack_wait_s=2.0) as cut,
    ):
        await cut.is_waiting(*SHARES)
        other = await taking(bus, "other", all_at(5), ack_wait_s=2.0)
        link.cut()
        for seq in range(MANY):
            await put(bus, seq, SHARES[seq % 4])
        async with asyncio.timeout(PATIENCE_S):
            while {*cut.numbers, *other.numbers} != set(range(MANY)):
                await asyncio.sleep(0.05)


async def test_deleted_consumers_are_made_again(bus, taking):
    taker = await taking(bus, "one", all_at(HIGHEST))
    js = bus._connection[1]
    for share in SHARES:
        await js.delete_consumer(table.SAMPLES.stream, f"pool-{POOL}-share-{share}")
    for seq in range(8):
        await put(bus, seq, SHARES[seq % 4])
    await taker.until(lambda: len(taker.held) == 8)

    assert taker.numbers == list(range(8))

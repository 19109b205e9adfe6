"""Which samples of a sampling session are done, in the order in which they were stored.

The place of a result in its stream is the cursor: any gateway can go on where another was.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from tinsmith import ids
from tinsmith.messages.table import SAMPLE_READY
from tinsmith_gateway.waiters import Waiters, wait_for

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.bus.facts import Fact
    from tinsmith.messages.services import SampleReady
    from tinsmith_gateway.config import GatewayConfig

CLONE_BLOCK = 10**9  # seq_ids that each copy of a client has to itself
MOST = 1000  # of one answer; the next poll gets the rest


class Completed(NamedTuple):
    """Results after a cursor, and the cursor after them."""

    facts: list[Fact]
    cursor: int


class Completions:
    """Answers clients that wait for all their samples with one poll."""

    def __init__(self, bus: Bus, config: GatewayConfig) -> None:
        self._bus = bus
        self._config = config
        self._subscriptions = AsyncExitStack()
        self._is_closing = False
        self._waiters = Waiters()

    async def start(self) -> None:
        """Listens for results that have become ready."""
        subscription = await self._bus.listen(SAMPLE_READY, self._on_sample_ready)
        self._subscriptions.push_async_callback(subscription.close)

    def release(self) -> None:
        """Ends all waiting."""
        self._is_closing = True
        self._waiters.wake_all()

    async def close(self) -> None:
        """Stops listening."""
        await self._subscriptions.aclose()

    async def wait(
        self, sampler_id: str, clone: int, *, after: int, timeout_s: float | None
    ) -> Completed:
        """What is done after the cursor ``after``; waits until there is something.

        At most for ``timeout_s``, and never longer than a poll is held. Raises BrokerUnavailable.
        """
        clock = asyncio.get_running_loop().time
        longest_s = self._config.long_poll_s
        deadline = clock() + min(longest_s if timeout_s is None else timeout_s, longest_s)
        with self._waiters.waiting(sampler_id) as woken:
            while True:
                woken.clear()
                found = await self._look(sampler_id, clone, after)
                left_s = deadline - clock()
                if found.facts or left_s <= 0 or self._is_closing:
                    return found
                after = found.cursor
                await wait_for(woken, min(left_s, self._config.recheck_s))

    async def _look(self, sampler_id: str, clone: int, after: int) -> Completed:
        found: list[Fact] = []
        while len(found) < MOST:
            fact = await self._bus.facts.next_result(sampler_id, after=after)
            if fact is None:
                break
            after = fact.stream_seq
            if fact.seq // CLONE_BLOCK == clone:
                found.append(fact)
        return Completed(found, after)

    def _on_sample_ready(self, ready: SampleReady) -> None:
        self._waiters.wake(ids.parse_future_id(ready.request_id).target)

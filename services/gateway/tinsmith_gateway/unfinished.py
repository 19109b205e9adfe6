"""How many requests of each owner are not done yet, and the limit on that.

Every gateway counts what it has taken in itself. It hears of what is done, and asks the queues
when it has to refuse something, in case it did not hear.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import islice
from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.errors import Busy
from tinsmith.messages.table import OP_DONE, SAMPLE_READY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinsmith.bus import Bus
    from tinsmith.messages.ops import OpDone
    from tinsmith.messages.services import SampleReady

    IsQueued = Callable[[], Awaitable[bool]]

LOOK_AT = 64  # of the oldest, whenever something would be refused
LOOK_EVERY_S = 1.0


class Unfinished:
    """Admits requests while their owner has few enough that are not done."""

    def __init__(self, bus: Bus, limit: int) -> None:
        self._bus = bus
        self._limit = limit
        self._of: dict[str, dict[str, IsQueued]] = {}  # owner: request ids, oldest first
        self._owners: dict[str, str] = {}  # by request id
        self._seqs: dict[str, set[int]] = {}  # by model or sampling session
        self._looked_at: dict[str, float] = {}
        self._subscriptions = AsyncExitStack()

    async def start(self) -> None:
        """Listens for what is done."""
        for subscription in (
            await self._bus.listen(OP_DONE, self._on_op_done),
            await self._bus.listen(SAMPLE_READY, self._on_sample_ready),
        ):
            self._subscriptions.push_async_callback(subscription.close)

    async def close(self) -> None:
        """Stops listening."""
        await self._subscriptions.aclose()

    def count(self, owner: str) -> int:
        """The requests of an owner that are not done."""
        return len(self._of.get(owner, ()))

    async def admit(self, owner: str, target: str, seq: int, is_queued: IsQueued) -> None:
        """Counts a request; Busy when there are too many. One that is sent again counts once.

        What comes before all that is counted of its model is admitted up to twice the limit:
        these wait for it, and would never be done.
        """
        request_id = ids.future_id(target, seq)
        if request_id in self._owners:
            return
        limit = 2 * self._limit if self._is_first(target, seq) else self._limit
        if self.count(owner) >= limit:
            await self._look(owner)
            if (count := self.count(owner)) >= limit:
                raise Busy(
                    f"unfinished requests: {count} of this key, at the limit of {self._limit}; "
                    "wait for some to be done (clients do so, and send the request again), or "
                    "raise gateway.max_unfinished"
                )
        self._owners[request_id] = owner
        self._of.setdefault(owner, {})[request_id] = is_queued
        self._seqs.setdefault(target, set()).add(seq)

    def done(self, request_id: str) -> None:
        """It has a result, or was never taken in; says nothing about one that is not counted."""
        if (owner := self._owners.pop(request_id, None)) is None:
            return
        _drop(self._of, owner, request_id)
        future = ids.parse_future_id(request_id)
        seqs = self._seqs[future.target]
        seqs.discard(future.seq)
        if not seqs:
            del self._seqs[future.target]

    def _is_first(self, target: str, seq: int) -> bool:
        seqs = self._seqs.get(target)
        return seqs is not None and seq < min(seqs)

    async def _look(self, owner: str) -> None:
        """Forgets those of the oldest that are no longer queued. Raises BrokerUnavailable."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at.get(owner, -LOOK_EVERY_S) < LOOK_EVERY_S:
            return
        self._looked_at[owner] = now
        oldest = list(islice(self._of.get(owner, {}).items(), LOOK_AT))
        queued = await asyncio.gather(*(is_queued() for _, is_queued in oldest))
        for (request_id, _), is_there in zip(oldest, queued, strict=True):
            if not is_there:
                self.done(request_id)

    def _on_op_done(self, done: OpDone) -> None:
        self.done(ids.future_id(done.model_id, done.seq))

    def _on_sample_ready(self, ready: SampleReady) -> None:
        self.done(ready.request_id)


def _drop(groups: dict[str, dict[str, IsQueued]], group: str, key: str) -> None:
    members = groups[group]
    del members[key]
    if not members:
        del groups[group]

"""How many requests of each owner are not done yet, and the limits on that.

Every gateway counts what all of them take in: they tell each other, and hear of what is done, all
without waiting for an answer. What is heard may be lost, so the count is corrected by what lies
on the queues: at the start, every so often, and before anything is refused. Requests that reach
several gateways in the same moment may exceed a limit by what was on its way between these.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from tinsmith import ids
from tinsmith.errors import Busy
from tinsmith.messages.services import RequestTaken
from tinsmith.messages.table import HELD, OP_DONE, OPS, REQUEST_TAKEN, SAMPLE_READY, SAMPLES
from tinsmith_gateway.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.bus import Bus
    from tinsmith.messages.ops import OpDone
    from tinsmith.messages.services import SampleReady
    from tinsmith_gateway.limits import Limits
    from tinsmith_gateway.registry import Registry

LOOK_EVERY_S = 1.0  # at most, for requests that would be refused
ARRIVE_S = 30.0  # longer than a request takes from being counted to being queued


class Backlog(NamedTuple):
    """Request ids on the queues."""

    training: set[str]
    sampling: set[str]
    held: set[str]

    @property
    def all(self) -> set[str]:
        """Whatever is not done."""
        return self.training | self.sampling | self.held


class Unfinished:
    """Admits requests while their owner has few enough that are not done."""

    def __init__(self, bus: Bus, registry: Registry, limits: Limits) -> None:
        self._bus = bus
        self._registry = registry
        self._limits = limits
        self._gateway = secrets.token_hex(4)
        self._tally = Tally()
        self._arriving: dict[str, float] = {}  # counted, and perhaps not queued yet
        self._done_meanwhile: set[str] = set()  # while somebody looks
        self._looking = asyncio.Lock()
        self._looked_at = -LOOK_EVERY_S
        self._subscriptions = AsyncExitStack()
        self.has_room = asyncio.Event()
        """Set when something that is held may be let go."""

    async def start(self) -> None:
        """Listens for what is taken in and done. Raises BrokerUnavailable."""
        for subscription in (
            await self._bus.listen(REQUEST_TAKEN, self._on_taken),
            await self._bus.listen(OP_DONE, self._on_op_done),
            await self._bus.listen(SAMPLE_READY, self._on_sample_ready),
        ):
            self._subscriptions.push_async_callback(subscription.close)
        await self.look()

    async def close(self) -> None:
        """Stops listening."""
        await self._subscriptions.aclose()

    def count(self, owner: str) -> int:
        """The requests of an owner that are not done."""
        return self._tally.count(owner)

    def counts(self) -> dict[str, int]:
        """Of all owners: how many are training, sampling, or held."""
        return self._tally.counts()

    def is_counted(self, request_id: str) -> bool:
        """Whether it was taken in, and is not known to be done."""
        return self._tally.get(request_id) is not None

    async def admit(self, owner: str, target: str, seq: int) -> bool:
        """Counts a request; one that is sent again counts once. Busy when there are too many.

        Whether it must be held: it is a sample, and its owner has its share of the samplers. What
        comes before all that is counted of its model is admitted up to twice the limit: these
        wait for it, and would never be done.
        """
        request_id = ids.future_id(target, seq)
        if (entry := self._tally.get(request_id)) is not None:
            return entry.is_held
        await self._check_limit(owner, target, seq)
        is_held = self._must_be_held(owner, target)
        self._tally.put(request_id, owner, is_held=is_held)
        self._arriving[request_id] = asyncio.get_running_loop().time()
        await self._tell(request_id, owner, is_held=is_held)
        return is_held

    def arrived(self, request_id: str) -> None:
        """It is on a queue."""
        self._arriving.pop(request_id, None)

    async def let_go(self, request_id: str, owner: str) -> None:
        """It is held no longer."""
        self._tally.put(request_id, owner, is_held=False)
        await self._tell(request_id, owner, is_held=False)

    def done(self, request_id: str) -> None:
        """It has a result, or was never taken in; says nothing about one that is not counted."""
        self._arriving.pop(request_id, None)
        if self._looking.locked():
            self._done_meanwhile.add(request_id)
        entry = self._tally.remove(request_id)
        if entry is not None and self._tally.held(entry.owner):
            self.has_room.set()

    def owners_with_room(self) -> list[str]:
        """Those of whom something is held, and fewer samples than their share are with samplers."""
        return [owner for owner in self._tally.holders() if self._is_below_share(owner)]

    def has_room_for(self, owner: str) -> bool:
        """Whether the samplers may be given one more of the owner's that are held."""
        return self._tally.held(owner) > 0 and self._is_below_share(owner)

    def why_held(self, request_id: str) -> str | None:
        """In words for the user; None for what is not held."""
        entry = self._tally.get(request_id)
        if entry is None or not entry.is_held:
            return None
        return (
            f"held: {self._tally.sampling(entry.owner)} samples of this key are being worked on, "
            f"of the {self._limits.sampling_share(entry.owner)} that are at a time "
            f"(gateway.sampling_share); {self._tally.ahead(entry)} of its others come before "
            "this one"
        )

    async def look(self) -> Backlog:
        """Counts anew what the queues hold, which it answers. Raises BrokerUnavailable."""
        async with self._looking:
            self._done_meanwhile.clear()
            before = self._tally.request_ids()
            training = _request_ids(await self._bus.subjects(OPS))
            # In this order: what is let go is on the other queue before it leaves this one.
            held = _request_ids(await self._bus.subjects(HELD))
            sampling = _request_ids(await self._bus.subjects(SAMPLES))
            found = Backlog(training, sampling, held - sampling)
            self._correct(before, found)
        return found

    def _correct(self, before: set[str], found: Backlog) -> None:
        oldest = asyncio.get_running_loop().time() - ARRIVE_S
        self._arriving = {key: at for key, at in self._arriving.items() if at > oldest}
        queued = found.all
        for request_id in before - queued - self._arriving.keys():
            self.done(request_id)
        for request_id in sorted(queued - before - self._done_meanwhile, key=_order):
            owner = self._owner_of(request_id)
            if owner is not None and self._tally.get(request_id) is None:
                self._tally.put(request_id, owner, is_held=request_id in found.held)
        for request_id in found.sampling & before:
            entry = self._tally.get(request_id)
            if entry is not None and entry.is_held:
                self._tally.put(request_id, entry.owner, is_held=False)
        self.has_room.set()

    async def _check_limit(self, owner: str, target: str, seq: int) -> None:
        limit = self._limits.max_unfinished(owner)
        if self.count(owner) < limit:
            return
        most = 2 * limit if self._tally.is_first(target, seq) else limit
        if self.count(owner) < most:
            return
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            await self.look()
        if (count := self.count(owner)) >= most:
            raise Busy(
                f"unfinished requests: {count} of this key, at the limit of {limit}; wait for some "
                "to be done (clients do so, and send the request again), or raise the key's limit "
                "(tinsmith keys limit) or gateway.max_unfinished"
            )

    def _must_be_held(self, owner: str, target: str) -> bool:
        is_sample = ids.parse_future_id(ids.future_id(target, 0)).kind == "sample"
        return is_sample and (self._tally.held(owner) > 0 or not self._is_below_share(owner))

    def _is_below_share(self, owner: str) -> bool:
        return self._tally.sampling(owner) < self._limits.sampling_share(owner)

    def _owner_of(self, request_id: str) -> str | None:
        future = ids.parse_future_id(request_id)
        key = ids.token(future.target)
        registry = self._registry
        found = registry.runs.peek(key) if future.kind == "train" else registry.samplers.peek(key)
        return None if found is None else found.owner

    async def _tell(self, request_id: str, owner: str, *, is_held: bool) -> None:
        taken = RequestTaken(
            request_id=request_id, owner=owner, gateway=self._gateway, is_held=is_held
        )
        await self._bus.emit(REQUEST_TAKEN, taken)

    def _on_taken(self, taken: RequestTaken) -> None:
        if taken.gateway != self._gateway:
            self._tally.put(taken.request_id, taken.owner, is_held=taken.is_held)

    def _on_op_done(self, done: OpDone) -> None:
        self.done(ids.future_id(done.model_id, done.seq))

    def _on_sample_ready(self, ready: SampleReady) -> None:
        self.done(ready.request_id)


def _request_ids(subjects: Iterable[str]) -> set[str]:
    """All three queues' subjects end with the target and the number in it."""
    ends = (subject.rsplit(".", 2) for subject in subjects)
    return {ids.future_id(ids.of_token(target), int(seq)) for _, target, seq in ends}


def _order(request_id: str) -> tuple[str, int]:
    future = ids.parse_future_id(request_id)
    return future.target, future.seq

"""The receiver: an engine's memory follows a lineage, and serves nothing that is not proven.

A version is fetched, read and proven beside the service; then the engine pauses, is written, and
what was written is read back. Whoever finds other bits than a root names fences itself, serves
nothing, and starts again from bits that it can prove.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import structlog

from tinsmith.bus.chain import CutChain
from tinsmith.errors import BrokerUnavailable, StorageFull, VersionUnmet
from tinsmith.messages.weights import WeightsStatus
from tinsmith.weights.catchup import BrokenChain, Chronicle
from tinsmith.weights.held import Held
from tinsmith.weights.memory import StagedMemory
from tinsmith.weights.planes import plane
from tinsmith.weights.receiving import Fetcher, Unusable
from tinsmith.weights.state import WrongBits
from tinsmith.weights.streams import DamagedStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from tinsmith.bus.lineages import Lineages
    from tinsmith.messages.weights import ReplicaState, WeightsStored
    from tinsmith.weights.held import Staging, Write
    from tinsmith.weights.memory import EngineMemory

    Memory = EngineMemory | StagedMemory
    Route = tuple[WeightsStored, ...]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReceiverSettings:
    """Of one receiver."""

    lineage_id: str
    replica: str
    plane: str = "bf16"
    """One of ``planes.PLANES``: what the engine's arrays hold."""
    checks_all_in_pause: bool = False
    """Digest all of the engine's memory before it computes again, not only what was written."""
    recheck_s: float = 300.0
    """So often the engine's whole memory is digested while it serves, and once per version."""
    beat_s: float = 2.0
    """So often the status is told; at every change too."""
    retry_s: float = 1.0
    """Pause before a broken or unusable lineage is looked at again."""


class Serving(NamedTuple):
    """The version that the engine computes with."""

    version: int
    root: str
    plane_root: str


class Receiver:
    """Keeps one engine at the newest version of a lineage, for as long as ``run`` runs."""

    def __init__(
        self,
        lineages: Lineages,
        memory: Memory,
        settings: ReceiverSettings,
        tell: Callable[[WeightsStatus], Awaitable[None]],
    ) -> None:
        """``tell`` sends the status to whom it may concern: an event on the bus."""
        self.serving: Serving | None = None
        """What answers may be made with; an answer leaves only if it still is what it was at
        the answer's first token, or if the caller allows a change in flight."""
        self._lineages = lineages
        self._memory = memory
        self._settings = settings
        self._tell = tell
        self._plane = plane(settings.plane)
        self._fetcher = Fetcher(lineages.chunks, retry_s=settings.retry_s)
        self._chronicle = Chronicle()
        self._held: Held | None = None
        self._version = 0  # of what is held
        self._news = asyncio.Event()
        self._unchecked: list[str] = []  # arrays whose turn to be digested comes
        self._checked_at = 0.0
        self._state: ReplicaState = "cold"
        self._told: WeightsStatus | None = None
        self._reason = ""
        self._mismatches = 0
        self._stage_ms = self._pause_ms = self._lag_ms = 0.0
        self._wants_full = False

    def require(self, *, min_version: int = 0, exact_version: int | None = None) -> Serving:
        """What is served, if it is of a version asked for.

        Raises:
            VersionUnmet: it is not, or nothing is: the request may be sent again.
        """
        found = self.serving
        wanted = f"at least {min_version}" if exact_version is None else f"exactly {exact_version}"
        if found is None or found.version < min_version:
            has = "none" if found is None else str(found.version)
        elif exact_version is not None and found.version != exact_version:
            has = str(found.version)
        else:
            return found
        raise VersionUnmet(
            f"weights: version {wanted} of {self._settings.lineage_id} is asked for, replica "
            f"{self._settings.replica} serves {has} ({self._state}); send it again, or elsewhere"
        )

    def status(self) -> WeightsStatus:
        """For the event that tells it."""
        version, root, plane_root = self.serving or (0, "", "")
        return WeightsStatus(
            lineage_id=self._settings.lineage_id,
            replica=self._settings.replica,
            plane=self._plane.id,
            state=self._state,
            epoch=self._chronicle.epoch,
            version=version,
            root=root,
            plane_root=plane_root,
            behind=max(self._chronicle.newest - version, 0),
            wants_full=self._wants_full,
            reason=self._reason,
            received_bytes=self._fetcher.received_bytes,
            mismatches=self._mismatches,
            stage_ms=self._stage_ms,
            pause_ms=self._pause_ms,
            lag_ms=self._lag_ms,
        )

    def doubt(self) -> None:
        """Serve nothing until all of the engine's memory was written again: it may be lost."""
        if self.serving is not None:
            self.serving = None
            self._news.set()

    async def run(self) -> None:
        """Follow until cancelled; ends early only for a mistake of ours."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name=f"follow {self._settings.lineage_id}")
            group.create_task(self._work(), name=f"receive {self._settings.lineage_id}")
            group.create_task(self._beat(), name=f"status {self._settings.lineage_id}")

    async def _follow(self) -> None:
        """Read the chain, from the newest whole state on."""
        lineage_id, is_again = self._settings.lineage_id, False
        while True:
            try:
                if not self._chronicle.stream_seq:
                    await self._read()
                first = self._chronicle.stream_seq + 1
                async for entry in self._lineages.follow(lineage_id, first=first):
                    self._chronicle.add(entry)
                    is_again = False
                    self._news.set()
            except (BrokenChain, CutChain) as exc:
                # Once it may be a lost message, and is read again; twice it is the chain. What is
                # served was in it before, and nothing behind the break is.
                if is_again or isinstance(exc, CutChain):
                    self._reason, self._chronicle = str(exc), Chronicle()
                    log.error("broken chain", lineage=lineage_id, error=str(exc))  # noqa: TRY400
                is_again = not is_again
            except BrokerUnavailable as exc:
                log.warning("lineage not read", lineage=lineage_id, error=str(exc))
            await asyncio.sleep(self._settings.retry_s)

    async def _read(self) -> None:
        """All that is there: to be gone through in one step."""
        first = await self._lineages.start(self._settings.lineage_id)
        read = Chronicle()
        try:
            async for entry in self._lineages.entries(self._settings.lineage_id, first=first):
                read.add(entry)
        finally:
            self._chronicle = read  # up to a break
            self._news.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.beat_s)
            await self._tell(self.status())

    async def _work(self) -> None:
        while True:
            self._news.clear()
            try:
                if not await self._advance() and not await self._check_one():
                    await self._wait()
            except Unusable as exc:
                self._chronicle.lose(exc.stored)
                log.warning("version received another way", error=str(exc))
            except (WrongBits, DamagedStream) as exc:
                await self._fence(exc)
            except (BrokerUnavailable, StorageFull) as exc:  # what is served stays as it is
                log.warning("version not received", error=str(exc))
                await asyncio.sleep(self._settings.retry_s)

    async def _wait(self) -> None:
        """Until there is news, or the memory is due to be digested again."""
        due_s = self._checked_at + self._settings.recheck_s - time.monotonic()
        try:
            async with asyncio.timeout(max(due_s, 0.0) if self.serving else None):
                await self._news.wait()
        except TimeoutError:
            self._unchecked = [] if self._held is None else list(self._held.digests)

    async def _advance(self) -> bool:
        """Go to the newest version that there is a way to; False when there is nothing to do."""
        chronicle, held = self._chronicle, self._held
        if held is not None and chronicle.is_without(self._version, held.root):
            self._held, self._version = None, 0
            raise WrongBits(f"{held.root}, which was served, is not in the log any more")
        if held is not None and self.serving is None:
            await self._install(held, self._version)
        route = chronicle.route(self._version, "" if held is None else held.root)
        self._wants_full = route is None and chronicle.newest > 0
        if not route:
            await self._become(self._resting)
            return False
        await self._become("staging")
        started = time.monotonic()
        if held is None or route[0].form == "full":
            await self._start_anew(route, started)
        else:
            await self._go_on(held, route, started)
        self._lag_ms = max(0.0, (time.time_ns() - route[-1].time_ns) / 1e6)
        chronicle.prune(self._version)
        await self._become("active")
        return True

    @property
    def _resting(self) -> ReplicaState:
        if self.serving is not None:
            return "active"
        return "fenced" if self._state == "fenced" else "cold"

    async def _start_anew(self, route: Route, started: float) -> None:
        """From a whole state, and what leads on from it."""
        state = await self._fetcher.state(route[0])
        held = await asyncio.to_thread(Held, state, self._plane)
        if len(route) > 1:
            staging = await self._stage(held, route[1:])
            await asyncio.to_thread(held.swap, staging)
        _prove_plane(held.plane.id, held.plane_root, route[-1])
        self._stage_ms = (time.monotonic() - started) * 1e3
        await self._install(held, route[-1].version)

    async def _go_on(self, held: Held, route: Route, started: float) -> None:
        """From what is served, in one step."""
        staging = await self._stage(held, route)
        _prove_plane(held.plane.id, staging.plane_root, route[-1])
        self._stage_ms = (time.monotonic() - started) * 1e3
        # Single elements are read back one by one; of what is written whole all is digested.
        written = {write.name for write in staging.writes if write.indices is None}
        digests = {name: staging.digests[name] for name in written}
        if self._settings.checks_all_in_pause:
            digests = {**held.digests, **staging.digests}
        found = Serving(route[-1].version, staging.root, staging.plane_root)
        await self._write(staging.writes, digests, found)
        await asyncio.to_thread(held.swap, staging)
        self._version = found.version

    async def _stage(self, held: Held, route: Route) -> Staging:
        """What the deltas of ``route`` come to, proven; Unusable names the one that is wrong."""
        deltas = [await self._fetcher.delta(stored) for stored in route]
        try:
            return await asyncio.to_thread(held.stage, *deltas)
        except (WrongBits, DamagedStream):
            self._mismatches += 1
            # Either these bits are not what they were, which fences, or the deltas are wrong.
            await asyncio.to_thread(held.state.check)
            for count, stored in enumerate(route, 1):
                try:
                    await asyncio.to_thread(held.stage, *deltas[:count])
                except (WrongBits, DamagedStream) as exc:
                    raise Unusable(stored, exc) from exc
            raise

    async def _install(self, held: Held, version: int) -> None:
        """Write all of the plane."""
        if (names := self._memory.names()) != held.digests.keys():
            odd = min(names ^ held.digests.keys())
            raise WrongBits(f"engine and lineage do not both have {odd!r} in {self._plane.id}")
        self._held, self._version = held, version
        found = Serving(version, held.root, held.plane_root)
        await self._write(list(held.whole()), held.digests, found)

    async def _write(self, writes: list[Write], digests: Mapping[str, int], now: Serving) -> None:
        """Let the engine compute with ``now``: the only place where that changes.

        Raises:
            WrongBits: its memory is not what was written; it computes with nothing then.
        """
        if isinstance(self._memory, StagedMemory):
            started = time.monotonic()
            await asyncio.to_thread(self._memory.stage, writes, digests)
            self._stage_ms += (time.monotonic() - started) * 1e3
        async with self._memory.pause():
            started = time.monotonic()
            self.serving = None
            await asyncio.to_thread(self._write_all, writes, digests)
            self.serving = now
            self._pause_ms = (time.monotonic() - started) * 1e3
        self._reason = ""
        self._unchecked = self._to_check(writes, digests)

    def _write_all(self, writes: list[Write], digests: Mapping[str, int]) -> None:
        """In the pause: write, and prove it."""
        memory = self._memory
        if isinstance(memory, StagedMemory):
            memory.swap()
            if not self._settings.checks_all_in_pause:
                return  # what was written is proven
        else:
            for write in writes:
                write.to(memory)
        for name, wanted in digests.items():
            if (found := memory.digest(name)) != wanted:
                raise WrongBits(f"the engine's {name!r} holds {found:016x}, not {wanted:016x}")

    def _to_check(self, writes: list[Write], digests: Mapping[str, int]) -> list[str]:
        """What was not digested in the pause, the next one last; whose turn it was keeps it."""
        turns, names = self._unchecked, self._memory.names()
        if not isinstance(self._memory, StagedMemory) or self._settings.checks_all_in_pause:
            return turns or list(names - digests.keys())
        # A swap compares what it has just written, and digests nothing.
        whole = {write.name for write in writes if write.indices is None}
        return [*(whole - set(turns)), *turns] if turns else list(names)

    async def _check_one(self) -> bool:
        """Digest one array of the engine's that has its turn; False when none has."""
        if self._held is None or self.serving is None or not self._unchecked:
            return False
        await asyncio.to_thread(self._held.check_array, self._memory, self._unchecked.pop())
        self._checked_at = time.monotonic()
        return True

    async def _fence(self, cause: WrongBits | DamagedStream) -> None:
        """Serve nothing, and keep the canonical bits only if they are proven."""
        self.serving = None
        self._mismatches += 1
        self._reason = str(cause)
        log.error("fenced", lineage=self._settings.lineage_id, version=self._version, cause=cause)
        await self._become("fenced")
        try:
            if self._held is not None:
                await asyncio.to_thread(self._held.state.check)
        except WrongBits:
            self._held, self._version = None, 0
        await asyncio.sleep(self._settings.retry_s)

    async def _become(self, state: ReplicaState) -> None:
        if (self._state, state) == ("fenced", "staging"):
            return  # until something is served again
        self._state = state
        if (status := self.status()) != self._told:
            self._told = status
            await self._tell(status)


def _prove_plane(plane_id: str, found: str, stored: WeightsStored) -> None:
    """Raises WrongBits when the publisher derived another plane from the same bits."""
    if (wanted := stored.plane_roots.get(plane_id, found)) != found:
        raise WrongBits(f"plane {plane_id} of version {stored.version} is {found}, not {wanted}")

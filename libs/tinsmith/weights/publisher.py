"""The publisher: a trainer's weights become versions of a lineage.

Chunks first, then the COMMIT, then the head. What the next delta starts from moves on if and only
if the COMMIT is durable: it never depends on who has received it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import structlog

from tinsmith.errors import BrokerUnavailable, StorageFull
from tinsmith.messages.weights import LineageOpened, WeightsStored
from tinsmith.weights.body import Whole
from tinsmith.weights.folding import Folding
from tinsmith.weights.held import Held
from tinsmith.weights.places import StreamChunks
from tinsmith.weights.planes import plane
from tinsmith.weights.policy import Policy, kept_from
from tinsmith.weights.sending import send
from tinsmith.weights.state import WeightState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tinsmith.bus.lineages import Lineages, LineageWriter
    from tinsmith.weights.bits import Bits
    from tinsmith.weights.delta import Delta
    from tinsmith.weights.held import Staging
    from tinsmith.weights.specs import TensorSpec
    from tinsmith.weights.state import Staged

log = structlog.get_logger(__name__)

COMMIT_PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to publish a lineage as."""

    lineage_id: str
    publisher_id: str
    content: Literal["full", "adapter"]
    about: Mapping[str, str] = field(default_factory=dict)
    planes: tuple[str, ...] = ()
    """Planes whose roots go into every COMMIT, so that receivers prove theirs against it."""
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A version that is durable."""

    version: int
    root: str
    form: str  # full or delta; same: nothing has changed, the version is that of before
    size: int = 0  # bytes of its chunks
    changed: int = 0  # elements
    encode_ms: float = 0.0
    publish_ms: float = 0.0  # all of it


class _Step(NamedTuple):
    """A way from the state here to the next one."""

    delta: Delta
    staged: Staged
    stagings: list[Staging]  # of the derived planes


class Publisher:
    """Publishes one lineage, as long as nobody else takes it. Made by ``open``."""

    def __init__(
        self, lineages: Lineages, writer: LineageWriter, wanted: Wanted, state: WeightState
    ) -> None:
        self._chunks = lineages.chunks
        self._writer = writer
        self._wanted = wanted
        self._state = state
        self._derived = [Held(state, plane(name)) for name in wanted.planes]
        self._folding = Folding(wanted.policy.fold)
        self._pending: _Step | None = None  # its COMMIT was sent: it has happened, or has not
        self._turn = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        lineages: Lineages,
        wanted: Wanted,
        specs: Mapping[str, TensorSpec],
        bits: Mapping[str, Bits],
    ) -> Publisher:
        """Take the lineage; ``bits`` are taken over, and what the next delta starts from.

        If they are those of the newest version, deltas go on from it. If not, or if there is
        none, the next version is a whole state.

        Raises:
            Fenced: another publisher took it in the same moment.
            BrokerUnavailable: the broker is away.
            InvalidRequest: ``bits`` are not what ``specs`` say, or a plane is not known.
        """
        state = await asyncio.to_thread(WeightState, specs, bits)
        opened = LineageOpened(
            lineage_id=wanted.lineage_id,
            epoch=0,
            publisher_id=wanted.publisher_id,
            content=wanted.content,
            about=dict(wanted.about),
            prev_blake3="",
        )
        writer = await lineages.take(opened, patience_s=COMMIT_PATIENCE_S)
        return await asyncio.to_thread(cls, lineages, writer, wanted, state)

    @property
    def epoch(self) -> int:
        """Of this publisher."""
        return self._writer.epoch

    @property
    def version(self) -> int:
        """The newest that is known to be durable."""
        return self._writer.version

    @property
    def root(self) -> str:
        """Of what the next delta starts from."""
        return self._state.root

    async def publish(self, bits: Mapping[str, Bits], *, step: int = 0) -> Published:
        """Make the state with the tensors ``bits`` (the others stay) the next version.

        ``bits`` are read until this returns, which is when the version is durable. ``upkeep``
        is due then, whenever there is time. ``step`` is the trainer's, for people.

        Raises:
            Fenced: another publisher has taken the lineage; this one is void.
            BrokerUnavailable, StorageFull: it may have happened or not; publish again, anything.
            InvalidRequest: ``bits`` do not fit the lineage.
        """
        async with self._turn:
            started = time.perf_counter()
            await self._settle()
            found = await asyncio.to_thread(self._prepare, bits)
            encoded = time.perf_counter()
            if self._is_based and not found.delta.changes:
                return Published(version=self.version, root=self.root, form="same")
            is_small = self._state.size_bytes <= self._wanted.policy.full_below_bytes
            if self._is_based and not is_small:
                await self._commit_delta(found, step)
            else:
                await self._commit_full(found, step)
            await self._move_head()
            stored = self._writer.recent[-1]
            return Published(
                version=stored.version,
                root=stored.root,
                form=stored.form,
                size=stored.size,
                changed=stored.changed,
                encode_ms=(encoded - started) * 1e3,
                publish_ms=(time.perf_counter() - started) * 1e3,
            )

    async def upkeep(self, *, live: Iterable[int] = (), wants_full: bool = False) -> None:
        """Store what is due beside the deltas, and forget what nobody needs.

        ``live`` are versions that receivers serve now; ``wants_full`` when one of them cannot
        catch up (``roll.Roll`` knows both). Raises as ``publish``: what is due then still is.
        """
        async with self._turn:
            await self._settle()
            if not self._is_based:
                return
            for skip in await asyncio.to_thread(self._folding.due, self._state):
                entry = self._entry("skip", self._state.root, changed=skip.delta.changed)
                base = {"base_version": skip.base_version, "base_root": skip.delta.base_root}
                await self._store(_wholes(skip.delta), msgspec.structs.replace(entry, **base))
            if wants_full or self._is_full_due():
                entry = self._entry("full", self._state.root, changed=self._state.elements)
                await self._store(self._state.full(), entry)
            await self._move_head()
            await self._forget(live)

    @property
    def _is_based(self) -> bool:
        """Whether the state here is the newest version."""
        newest = self._writer.newest
        return newest is not None and newest.root == self._state.root

    def _prepare(self, bits: Mapping[str, Bits]) -> _Step:
        delta, staged = self._state.prepare(bits)
        return _Step(delta, staged, [held.derive(staged) for held in self._derived])

    def _swap(self, found: _Step) -> None:
        self._state.swap(found.staged)
        for held, staging in zip(self._derived, found.stagings, strict=True):
            held.follow(staging)

    async def _settle(self) -> None:
        """Learn whether what is in doubt has happened, and become it if so."""
        await self._writer.settle()
        pending, self._pending = self._pending, None
        newest = self._writer.newest
        if pending is None or newest is None or newest.root != pending.delta.root:
            return
        await asyncio.to_thread(self._swap, pending)
        self._folding.add(self.version, pending.delta)

    async def _commit_delta(self, found: _Step, step: int) -> None:
        entry = self._entry("delta", found.delta.root, changed=found.delta.changed)
        stagings = zip(self._derived, found.stagings, strict=True)
        entry = msgspec.structs.replace(
            entry,
            version=self.version + 1,
            base_version=self.version,
            base_root=found.delta.base_root,
            commit_seq=0,
            step=step,
            plane_roots={held.plane.id: staging.plane_root for held, staging in stagings},
        )
        self._pending = found
        await self._store(_wholes(found.delta), entry)
        await self._settle()

    async def _commit_full(self, found: _Step, step: int) -> None:
        """A whole state has no base: whatever becomes of its COMMIT, no delta goes astray."""
        await asyncio.to_thread(self._swap, found)
        self._folding.clear()
        entry = self._entry("full", self._state.root, changed=found.delta.changed)
        entry = msgspec.structs.replace(entry, version=self.version + 1, commit_seq=0, step=step)
        await self._store(self._state.full(), entry)

    def _entry(
        self, form: Literal["full", "delta", "skip"], root: str, *, changed: int
    ) -> WeightsStored:
        """Of the newest version, without its chunks."""
        newest = self._writer.newest
        return WeightsStored(
            lineage_id=self._wanted.lineage_id,
            epoch=self.epoch,
            version=self.version,
            form=form,
            root=root,
            manifest=(),
            size=0,
            first_chunk=0,
            commit_seq=self._writer.commit_seq,
            changed=changed,
            elements=self._state.elements,
            step=0 if newest is None else newest.step,
            plane_roots={held.plane.id: held.plane_root for held in self._derived},
            prev_blake3="",
        )

    async def _store(self, wholes: Iterable[Whole], entry: WeightsStored) -> None:
        """Chunks, then the entry."""
        specs = self._state.specs if entry.form == "full" else None
        chunks = StreamChunks(self._chunks, entry.lineage_id)
        sent = await send(chunks, wholes, specs)
        await self._writer.store(
            msgspec.structs.replace(
                entry,
                manifest=sent.manifest,
                size=sent.size,
                first_chunk=chunks.first,
                time_ns=time.time_ns(),
            )
        )

    async def _move_head(self) -> None:
        """The chain has the version; a head that lags is moved with the next one."""
        try:
            await self._writer.move_head()
        except (BrokerUnavailable, StorageFull) as exc:
            log.warning("head not moved", lineage=self._wanted.lineage_id, error=str(exc))

    def _is_full_due(self) -> bool:
        full_size, delta_bytes, versions = 0, 0, 0
        for entry in self._writer.recent:
            if entry.form == "full":
                full_size, delta_bytes, versions = entry.size, 0, 0
            elif entry.form == "delta":
                delta_bytes, versions = delta_bytes + entry.size, versions + 1
        return self._wanted.policy.is_full_due(
            versions=versions, delta_bytes=delta_bytes, full_bytes=full_size
        )

    async def _forget(self, live: Iterable[int]) -> None:
        recent = self._writer.recent
        before = kept_from(recent, keep_full=self._wanted.policy.keep_full, live=live)
        if before is None or all(entry.first_chunk >= before for entry in recent):
            return
        await self._chunks.forget(self._wanted.lineage_id, before=before)
        recent[:] = [entry for entry in recent if entry.first_chunk >= before]


def _wholes(delta: Delta) -> Iterator[Whole]:
    for name, change in delta.changes.items():
        yield Whole(name, change, delta.digests[name])

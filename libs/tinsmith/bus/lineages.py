"""Weight lineages: one chain of entries each, with a head, and the chunks that they name.

An entry is appended when all of its chunks are there, and the head is moved after it. So a state
that can be seen is whole, and of two publishers only the one that took the lineage last appends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
from blake3 import blake3

from tinsmith import ids
from tinsmith.bus.chain import Chain, Link, Subjects, Tip, follow
from tinsmith.bus.chunks import ChunkStore
from tinsmith.bus.history import kept
from tinsmith.bus.table import Table
from tinsmith.bus.wire import last
from tinsmith.errors import Fenced
from tinsmith.messages.base import decoder, encode
from tinsmith.messages.table import LINEAGE_STREAM, LINEAGE_TEMPLATE, LINEAGES
from tinsmith.messages.weights import LineageEntry, LineageHead, LineageOpened, WeightsStored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.client import Client
    from nats.js import JetStreamContext

_ENTRIES = decoder(LineageEntry)


class Entry(NamedTuple):
    """One entry, and its place in the chain."""

    stream_seq: int
    blake3: str
    message: LineageEntry


class Lineages:
    """Reads any lineage and opens one for writing."""

    def __init__(self, connection: tuple[Client, JetStreamContext]) -> None:
        self._connection = connection
        self._js = connection[1]
        self._heads = Table(connection, LINEAGES)
        self.chunks = ChunkStore(connection)
        """Of all lineages."""

    async def head(self, lineage_id: str) -> LineageHead | None:
        """The newest version, as it was told; the chain may be ahead."""
        return await self._heads.get(ids.token(lineage_id))

    async def newest(self, lineage_id: str, form: str) -> Entry | None:
        """The newest ``full``, ``delta``, ``skip`` or ``open`` entry."""
        found = await last(self._js, LINEAGE_STREAM, _subject(lineage_id, form))
        return None if found is None else entry_of(found.seq or 0, found.data or b"")

    async def start(self, lineage_id: str) -> int:
        """The stream sequence from which the newest whole state and all after it are seen."""
        full = await self.newest(lineage_id, "full")
        if full is None or not isinstance(full.message, WeightsStored):
            return 1
        return full.message.commit_seq or full.stream_seq

    async def entries(self, lineage_id: str, *, first: int = 1) -> AsyncIterator[Entry]:
        """Every entry from stream sequence ``first`` on, up to the present last."""
        async for msg in kept(self._connection, LINEAGE_STREAM, _subject(lineage_id), first=first):
            yield entry_of(msg.metadata.sequence.stream, msg.data)

    async def follow(self, lineage_id: str, *, first: int = 1) -> AsyncIterator[Entry]:
        """As ``entries``, and then each as it is appended; see ``chain.follow``."""
        async for link in follow(self._connection, _subjects(lineage_id), first=first):
            yield _read(link)

    async def take(
        self, opened: LineageOpened, *, patience_s: float | None = None
    ) -> LineageWriter:
        """Take the lineage for writing: from now on every earlier publisher's append fails.

        ``opened`` says who; its epoch and digest are filled in. ``patience_s`` is that of appends.

        Raises:
            Fenced: another publisher took it in the same moment.
        """
        lineage_id = opened.lineage_id
        end = await last(self._js, LINEAGE_STREAM, _subject(lineage_id))
        tip, epoch = Tip(), 0
        if end is not None:
            entry = entry_of(end.seq or 0, end.data or b"")
            tip, epoch = Tip(entry.stream_seq, entry.blake3), entry.message.epoch
        chain = Chain(
            self._connection, _subjects(lineage_id), tip, name=lineage_id, patience_s=patience_s
        )
        writer = LineageWriter(chain, self._heads, epoch=epoch + 1)
        await writer.open(msgspec.structs.replace(opened, epoch=epoch + 1))
        # After the take-over: nobody else can append a newer one now.
        async for entry in self.entries(lineage_id, first=await self.start(lineage_id)):
            writer.note(entry)
        return writer


class LineageWriter:
    """The one writer of a lineage, for as long as nobody else takes it."""

    def __init__(self, chain: Chain, heads: Table[LineageHead], *, epoch: int) -> None:
        self.epoch = epoch
        """Rises with every take-over."""
        self.recent: list[WeightsStored] = []
        """What leads to the newest version: of before it was taken, from a whole state on."""
        self.newest: WeightsStored | None = None
        """The COMMIT of the newest version."""
        self.commit_seq = 0
        """Its stream sequence."""
        self._chain = chain
        self._heads = heads
        self._doubtful: WeightsStored | None = None  # its append was not answered

    @property
    def version(self) -> int:
        """The newest version that is committed; 0: none."""
        return 0 if self.newest is None else self.newest.version

    def note(self, entry: Entry) -> None:
        """Take in the next entry of the chain."""
        stored = entry.message
        if isinstance(stored, WeightsStored):
            self.recent.append(stored)
            if stored.version > self.version:
                self.newest, self.commit_seq = stored, entry.stream_seq

    async def open(self, opened: LineageOpened) -> None:
        """Append the entry that fences every earlier publisher."""
        await self._append(opened)

    async def store(self, stored: WeightsStored) -> None:
        """Append ``stored``, whose chunks are all there; its digest is filled in.

        Raises:
            Fenced: another publisher has taken the lineage.
            BrokerUnavailable, StorageFull: whether it was appended is unknown; see ``settle``.
        """
        self._doubtful = stored
        try:
            entry = await self._append(stored)
        except Fenced:
            self._doubtful = None
            raise
        self._doubtful = None
        self.note(entry)

    async def settle(self) -> None:
        """Append an entry in doubt again, byte for byte: afterwards it is there, once.

        Raises:
            Fenced, BrokerUnavailable, StorageFull: as ``store``.
        """
        if self._doubtful is not None:
            await self.store(self._doubtful)

    async def move_head(self) -> None:
        """Tell the newest version, unless a newer one is told.

        Raises:
            BrokerUnavailable, StorageFull: it is told later; the chain has it.
        """
        if (newest := self.newest) is None:
            return
        wanted = LineageHead(
            lineage_id=newest.lineage_id,
            epoch=self.epoch,
            version=newest.version,
            root=newest.root,
            full_version=max((e.version for e in self.recent if e.form == "full"), default=0),
            stream_seq=self.commit_seq,
        )

        def ahead(present: LineageHead | None) -> LineageHead | None:
            if present is not None and (present.epoch, present.version) > (
                wanted.epoch,
                wanted.version,
            ):
                return None
            return wanted

        await self._heads.update(ids.token(newest.lineage_id), ahead)

    async def _append(self, entry: LineageEntry) -> Entry:
        written = entry

        def chained(prev_blake3: str) -> bytes:
            nonlocal written
            written = msgspec.structs.replace(entry, prev_blake3=prev_blake3)
            return encode(written)

        tip = await self._chain.append(subject_of(entry), chained)
        return Entry(tip.stream_seq, tip.blake3, written)


def entry_of(stream_seq: int, data: bytes) -> Entry:
    """The entry that ``data`` is."""
    return Entry(stream_seq, blake3(data).hexdigest(), _ENTRIES.decode(data))


def subject_of(entry: LineageEntry) -> str:
    """Where ``entry`` is kept."""
    match entry:
        case LineageOpened():
            return _subject(entry.lineage_id, "open", entry.epoch)
        case WeightsStored():
            return _subject(entry.lineage_id, entry.form, entry.version)


def _read(link: Link) -> Entry:
    return entry_of(link.stream_seq, link.data)


def _subjects(lineage_id: str) -> Subjects:
    return Subjects(LINEAGE_STREAM, _subject(lineage_id))


def _subject(lineage_id: str, kind: str = "*", number: int | None = None) -> str:
    return LINEAGE_TEMPLATE.subject(
        lineage=ids.token(lineage_id), kind=kind, number="*" if number is None else str(number)
    )

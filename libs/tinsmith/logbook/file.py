"""An exported log: one file with a run's entries and every blob that they refer to."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tinsmith.errors import BlobMissing, InvalidRequest, NotFound, SealBroken, UserError
from tinsmith.ids import check_model_id
from tinsmith.logbook.anchors import Chain
from tinsmith.logbook.container import CHUNK_BYTES, Kind, Part, PartDamaged, read_part, scan
from tinsmith.logbook.entry import Entry, LogDamaged, place_after, place_of
from tinsmith.messages.anchors import Anchored
from tinsmith.messages.base import GENESIS
from tinsmith.messages.ops import Record
from tinsmith.messages.registry import ForgottenRun
from tinsmith.sealing import ClosedSeal, KeySeal
from tinsmith.sealing.seal import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Container, Iterator
    from pathlib import Path

    from tinsmith.messages.anchors import PrunedLog
    from tinsmith.messages.base import BlobRef
    from tinsmith.sealing import Seal

MAX_PARTS = 4_000_000  # each takes some 300 bytes of memory

T = TypeVar("T")


class Cover(msgspec.Struct, frozen=True, kw_only=True):
    """The first part: whose log it is, and what opens it."""

    model_id: str
    tinsmith: str  # the version that wrote the file
    data_key: bytes = b""  # of what is sealed; empty when nothing is, or the key was left out
    forgotten: ForgottenRun | None = None  # when that key was destroyed before


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The last part: what came before it."""

    entries: int
    blobs: int
    head_blake3: str  # of the last entry
    samples: int = 0
    anchors: int = 0  # how often it was anchored


class FileLogbook:
    """A ``Logbook`` of one run. Made by ``open``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._index = _Index(fd)
        self._cover = self._read_cover()
        self._seal = _seal_of(self._cover)

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[FileLogbook]:
        """Open the file and find its parts; their bytes are read when they are asked for.

        Raises:
            NotFound: there is no such file.
            InvalidRequest: it cannot be read.
            LogDamaged: it does not begin as an exported log does.
        """
        if not path.exists():
            raise NotFound(f"{path}: there is no such file")
        if not path.is_file():
            raise InvalidRequest(f"{path}: not a file, so no exported log")
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as exc:
            raise InvalidRequest(f"{path}: cannot be read: {exc.strerror}") from exc
        try:
            yield cls(fd)
        finally:
            os.close(fd)

    async def runs(self) -> list[str]:
        """The one run of the file."""
        return [self._cover.model_id]

    async def pruned(self) -> dict[str, PrunedLog]:
        """None: a file has its log."""
        return {}

    async def length(self, model_id: str) -> int:
        """See ``Logbook``."""
        return len(self._entries(model_id))

    async def entries(self, model_id: str) -> AsyncIterator[Entry]:
        """See ``Logbook``; LogDamaged after the last one, when there must have been more."""
        parts = self._entries(model_id)
        seq, head, place = None, GENESIS, "the cover"
        for number, part in enumerate(parts, start=1):
            unread = place_after(number, seq)
            entry = Entry.read(self.read(part, unread, "entry"), unread)
            if isinstance(entry.entry, Record):
                seq = entry.entry.seq
            head, place = entry.blake3, place_of(entry.entry, number)
            yield entry
        self._check_end(head, f"after {place}")

    async def newest(self, model_id: str) -> list[Entry]:
        """See ``Logbook``."""
        found: dict[type, Entry] = {}
        async for entry in self.entries(model_id):
            found.pop(type(entry.entry), None)
            found[type(entry.entry)] = entry
        return list(found.values())

    async def anchors(self, *, is_fresh: bool = False) -> Chain:  # noqa: ARG002 - a file's stay
        """See ``Logbook``."""
        return Chain(heads={self._cover.model_id: list(self._anchored())})

    async def seal(self, model_id: str) -> Seal:
        """See ``Logbook``."""
        self._require_run(model_id)
        return self._seal

    async def blob(self, ref: BlobRef) -> bytes:
        """See ``Logbook``."""
        return b"".join([piece async for piece in self._pieces(ref)])

    async def check_blob(self, ref: BlobRef) -> None:
        """See ``Logbook``."""
        async for _ in self._pieces(ref):
            pass

    def require_only(self, digests: Container[str]) -> None:
        """LogDamaged when the file has a blob that is not among ``digests``."""
        for digest in self._index.blobs:
            if digest not in digests:
                raise LogDamaged(f"blob {digest}", "blob", "no entry refers to it")

    def sample_parts(self, model_id: str) -> list[Part]:
        """Where the model's samples lie; ``read`` reads them."""
        self._require_run(model_id)
        return self._index.samples

    def read(self, part: Part, place: str, field: str) -> bytes:
        """The bytes of ``part``; LogDamaged at ``place`` when they are not what was written."""
        try:
            return b"".join(read_part(self._fd, part))
        except PartDamaged as exc:
            raise LogDamaged(place, field, str(exc)) from exc

    def _entries(self, model_id: str) -> list[Part]:
        self._require_run(model_id)
        return self._index.entries

    def _require_run(self, model_id: str) -> None:
        if model_id != self._cover.model_id:
            raise NotFound(f"run: the file has {self._cover.model_id}, not {model_id}")

    def _read_cover(self) -> Cover:
        cover = self._decode(self._index.cover, Cover, "the cover", "cover")
        try:
            check_model_id(cover.model_id)
        except UserError as exc:
            raise LogDamaged("the cover", "model_id", str(exc)) from exc
        return cover

    def _anchored(self) -> tuple[Anchored, ...]:
        if self._index.anchors is None:
            return ()
        found = self._decode(self._index.anchors, tuple[Anchored, ...], "the anchors", "anchors")
        for one in found:
            if one.head.model_id != self._cover.model_id:
                problem = f"{one.head.model_id!r} is not {self._cover.model_id}"
                raise LogDamaged("the anchors", "model_id", problem)
        return found

    def _check_end(self, head: str, place: str) -> None:
        end = self._decode(self._index.end, End, place, "end")
        found = End(
            entries=len(self._index.entries),
            blobs=len(self._index.blobs),
            head_blake3=head,
            samples=len(self._index.samples),
            anchors=len(self._anchored()),
        )
        for field in End.__struct_fields__:
            told, seen = getattr(end, field), getattr(found, field)
            if told != seen:
                raise LogDamaged(place, field, f"the file's end says {told}, but it has {seen}")

    def _decode(self, part: Part | None, type_: type[T], place: str, field: str) -> T:
        if part is None:
            raise LogDamaged(place, field, self._index.damage or "the file ends without one")
        try:
            return msgspec.msgpack.decode(self.read(part, place, field), type=type_)
        except msgspec.MsgspecError as exc:
            raise LogDamaged(place, field, str(exc)) from exc

    async def _pieces(self, ref: BlobRef) -> AsyncIterator[bytes]:
        part = self._find(ref)
        pieces = read_part(self._fd, part)
        try:
            while True:
                if part.raw_size < CHUNK_BYTES:
                    piece = next(pieces, None)
                else:
                    piece = await asyncio.to_thread(next, pieces, None)
                if piece is None:
                    return
                yield piece
        except PartDamaged as exc:
            raise BlobMissing(f"blob {ref.blake3} in the file is damaged: {exc}") from exc

    def _find(self, ref: BlobRef) -> Part:
        part = self._index.blobs.get(ref.blake3)
        if part is None:
            raise BlobMissing(f"blob {ref.blake3[:80]!r} is not in the file")
        if part.raw_size != ref.size:
            raise BlobMissing(f"blob {ref.blake3} has {part.raw_size} bytes, not {ref.size}")
        return part


def _seal_of(cover: Cover) -> Seal:
    """What opens the sealed entries of a file, if there are any."""
    if cover.forgotten is not None:
        return ClosedSeal.of(cover.forgotten)
    if not cover.data_key:
        return ClosedSeal(
            SealBroken(
                f"the contents of run {cover.model_id} are sealed, and the file was exported "
                "without their key; export it without --sealed, or import it where the key is"
            )
        )
    if len(cover.data_key) != KEY_BYTES:
        problem = f"{len(cover.data_key)} bytes are no key, which has {KEY_BYTES}"
        raise LogDamaged("the cover", "data_key", problem)
    return KeySeal(cover.data_key)


class _Index:
    """Where the parts of a file lie, as far as their headers can be read."""

    def __init__(self, fd: int) -> None:
        self.cover: Part | None = None
        self.entries: list[Part] = []
        self.blobs: dict[str, Part] = {}  # by blake3 in hex
        self.samples: list[Part] = []
        self.anchors: Part | None = None
        self.end: Part | None = None
        self.damage = ""
        """Why nothing more was found; it belongs to what follows the last entry."""
        try:
            for part in scan(fd):
                self._check_order(part)
                self._add(part)
        except PartDamaged as exc:
            self.damage = str(exc)
            self.end = None

    def _check_order(self, part: Part) -> None:
        if (part.kind is Kind.COVER) != (self.cover is None):
            raise PartDamaged("the cover is not the first part, or not the only cover")
        if self.end is not None:
            raise PartDamaged("more follows the end")
        if part.kind is Kind.BLOB and part.blake3.hex() in self.blobs:
            raise PartDamaged(f"blob {part.blake3.hex()} is there twice")
        if part.kind is Kind.ANCHORS and (self.anchors or self.entries or self.blobs):
            raise PartDamaged("the anchors do not follow the cover")
        if part.kind is Kind.ENTRY and self.samples:
            raise PartDamaged("an entry follows a sample")
        if len(self.entries) + len(self.blobs) + len(self.samples) > MAX_PARTS:
            raise PartDamaged(f"there are over {MAX_PARTS} parts, more than the format allows")

    def _add(self, part: Part) -> None:
        match part.kind:
            case Kind.COVER:
                self.cover = part
            case Kind.ENTRY:
                self.entries.append(part)
            case Kind.BLOB:
                self.blobs[part.blake3.hex()] = part
            case Kind.SAMPLE:
                self.samples.append(part)
            case Kind.ANCHORS:
                self.anchors = part
            case Kind.END:
                self.end = part

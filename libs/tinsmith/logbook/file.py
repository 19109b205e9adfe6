"""An exported log: one file with a run's entries and every blob that they refer to."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tinsmith.errors import BlobMissing, InvalidRequest, NotFound, UserError
from tinsmith.ids import check_model_id
from tinsmith.logbook.container import CHUNK_BYTES, Kind, Part, PartDamaged, read_part, scan
from tinsmith.logbook.entry import GENESIS, Entry, LogDamaged, place_after, place_of
from tinsmith.messages.ops import Record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Container, Iterator
    from pathlib import Path

    from tinsmith.messages.base import BlobRef

MAX_PARTS = 4_000_000  # each takes some 300 bytes of memory

T = TypeVar("T", bound=msgspec.Struct)


class Cover(msgspec.Struct, frozen=True, kw_only=True):
    """The first part: whose log it is."""

    model_id: str
    tinsmith: str  # the version that wrote the file


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The last part: what came before it."""

    entries: int
    blobs: int
    head_blake3: str  # of the last entry


class FileLogbook:
    """A ``Logbook`` of one run. Made by ``open``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._index = _Index(fd)
        self._cover = self._read_cover()

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

    async def length(self, model_id: str) -> int:
        """See ``Logbook``."""
        return len(self._entries(model_id))

    async def entries(self, model_id: str) -> AsyncIterator[Entry]:
        """See ``Logbook``; LogDamaged after the last one, when there must have been more."""
        parts = self._entries(model_id)
        seq, head, place = None, GENESIS, "the cover"
        for number, part in enumerate(parts, start=1):
            unread = place_after(number, seq)
            entry = Entry.read(self._read(part, unread, "entry"), unread)
            if isinstance(entry.entry, Record):
                seq = entry.entry.seq
            head, place = entry.blake3, place_of(entry.entry, number)
            yield entry
        self._check_end(head, f"after {place}")

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

    def _entries(self, model_id: str) -> list[Part]:
        if model_id != self._cover.model_id:
            raise NotFound(f"run: the file has {self._cover.model_id}, not {model_id}")
        return self._index.entries

    def _read_cover(self) -> Cover:
        cover = self._decode(self._index.cover, Cover, "the cover")
        try:
            check_model_id(cover.model_id)
        except UserError as exc:
            raise LogDamaged("the cover", "model_id", str(exc)) from exc
        return cover

    def _check_end(self, head: str, place: str) -> None:
        end = self._decode(self._index.end, End, place)
        found = End(
            entries=len(self._index.entries), blobs=len(self._index.blobs), head_blake3=head
        )
        for field in End.__struct_fields__:
            told, seen = getattr(end, field), getattr(found, field)
            if told != seen:
                raise LogDamaged(place, field, f"the file's end says {told}, but it has {seen}")

    def _decode(self, part: Part | None, type_: type[T], place: str) -> T:
        field = type_.__name__.lower()
        if part is None:
            raise LogDamaged(place, field, self._index.damage or "the file ends without one")
        try:
            return msgspec.msgpack.decode(self._read(part, place, field), type=type_)
        except msgspec.MsgspecError as exc:
            raise LogDamaged(place, field, str(exc)) from exc

    def _read(self, part: Part, place: str, field: str) -> bytes:
        try:
            return b"".join(read_part(self._fd, part))
        except PartDamaged as exc:
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


class _Index:
    """Where the parts of a file lie, as far as their headers can be read."""

    def __init__(self, fd: int) -> None:
        self.cover: Part | None = None
        self.entries: list[Part] = []
        self.blobs: dict[str, Part] = {}  # by blake3 in hex
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
        if len(self.entries) + len(self.blobs) > MAX_PARTS:
            raise PartDamaged(f"there are over {MAX_PARTS} parts, more than the format allows")

    def _add(self, part: Part) -> None:
        match part.kind:
            case Kind.COVER:
                self.cover = part
            case Kind.ENTRY:
                self.entries.append(part)
            case Kind.BLOB:
                self.blobs[part.blake3.hex()] = part
            case Kind.END:
                self.end = part

"""The blob store: bytes named by their blake3, written once, verified at every read.

obstore is called on threads of ours, never through its asyncio functions: those end on threads of
its own that still want the interpreter after the result is there, and a process that exits in
that moment is aborted.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from blake3 import blake3

from tinsmith.blobs.errors import told, write_error
from tinsmith.blobs.folder import Folder
from tinsmith.blobs.opening import objects
from tinsmith.errors import BlobMissing, ServerError, StartupError
from tinsmith.messages.base import BlobRef

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tinsmith.blobs.place import Place, Stored
    from tinsmith.config import BlobsConfig

READ_BYTES = 4 << 20  # in one piece, when a part is read in pieces
GET_BYTES = 16 << 20  # in one request, when all of it is read
HASH_IN_THREAD_BYTES = 4 << 20  # below this, hashing is cheaper than a thread hop
_FAULTS = (OSError, obstore.exceptions.BaseError)


class BlobStore:
    """A flat, content-addressed store. Putting the same bytes twice stores them once."""

    def __init__(self, place: Place, *, where: str) -> None:
        self._place = place
        self.where = where
        """The folder, or the address, for people."""

    @classmethod
    def open(cls, url: str, *, default: Path, settings: BlobsConfig | None = None) -> BlobStore:
        """Open ``url`` (file:///..., s3://bucket/prefix, memory:///), or the default folder.

        ``settings`` are those of an object store.

        Raises:
            StartupError: the URL is not understood, or the folder cannot be made.
        """
        try:
            if url in ("", f"file://{default}"):
                return cls(Folder(default), where=str(default))
            if url.startswith("file://"):
                folder = Path(url.removeprefix("file://"))
                return cls(Folder(folder), where=str(folder))
            return cls(objects(url, settings), where=url)
        except (*_FAULTS, ValueError) as exc:
            msg = f"blobs.url: cannot open {url or str(default)!r}: {told(exc)}"
            raise StartupError(msg) from exc

    @classmethod
    def configured(cls, settings: BlobsConfig, *, default: Path) -> BlobStore:
        """The store that the configuration means; otherwise as ``open``."""
        return cls.open(settings.url, default=default, settings=settings)

    async def put(self, data: bytes) -> BlobRef:
        """Store ``data`` durably and name it.

        Raises:
            StorageFull: the disk or the quota is full; nothing is left half-written.
            ServerError: the store cannot be written for another reason.
        """
        ref = await self.name(data)
        try:
            await asyncio.to_thread(self._place.put, _key(ref), data)
        except _FAULTS as exc:
            raise write_error(exc, self.where) from exc
        return ref

    async def name(self, data: bytes) -> BlobRef:
        """What ``data`` is called, whether it is there or not."""
        return BlobRef(await _digest(data), len(data))

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes that ``ref`` names, verified.

        Raises:
            BlobMissing: they are absent, or not the bytes that were stored.
            ServerError: the store cannot be read now; it may come back.
        """
        with self._reading(ref):
            data = await asyncio.to_thread(self._read, ref)
        if len(data) != ref.size or await _digest(data) != ref.blake3:
            msg = f"blob {ref.blake3} in {self.where} is damaged: its bytes have another digest"
            raise BlobMissing(msg)
        return data

    async def read(self, ref: BlobRef, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from ``start`` to before ``end`` in pieces, unverified.

        Raises:
            BlobMissing: they are not there.
            ServerError: the store cannot be read now.
        """
        for first in range(start, end, READ_BYTES):
            last = min(first + READ_BYTES, end)
            with self._reading(ref):
                piece = await asyncio.to_thread(self._piece, ref, first, last)
            yield piece

    @contextmanager
    def _reading(self, ref: BlobRef) -> Iterator[None]:
        """Says in our words why the bytes of ``ref`` cannot be read."""
        try:
            yield
        except FileNotFoundError as exc:
            msg = f"blob {ref.blake3} ({ref.size} bytes) is not in {self.where}"
            raise BlobMissing(msg) from exc
        except _FAULTS as exc:
            msg = f"blob store {self.where} cannot be read: {told(exc)}"
            raise ServerError(msg) from exc

    def _read(self, ref: BlobRef) -> bytes:
        """In requests of a bounded size: one that breaks off does not begin at the beginning."""
        if ref.size <= GET_BYTES:
            return self._whole(ref)
        data = BytesIO()
        for first in range(0, ref.size, GET_BYTES):
            data.write(self._piece(ref, first, min(first + GET_BYTES, ref.size)))
        return data.getvalue()

    def _whole(self, ref: BlobRef) -> bytes:
        try:
            return bytes(obstore.get(self._place.store, _key(ref)).bytes())
        except FileNotFoundError:
            return bytes(obstore.get(self._place.store, self._other_key(ref)).bytes())

    def _piece(self, ref: BlobRef, start: int, end: int) -> bytes:
        store = self._place.store
        try:
            return bytes(obstore.get_range(store, _key(ref), start=start, end=end))
        except FileNotFoundError:
            return bytes(obstore.get_range(store, self._other_key(ref), start=start, end=end))

    def _other_key(self, ref: BlobRef) -> str:
        """Where it is if it is not where it is looked for first; FileNotFoundError."""
        if (key := self._place.find(_key(ref), ref.size)) is None:
            raise FileNotFoundError(ref.blake3)
        return key

    async def has(self, ref: BlobRef) -> bool:
        """Whether the bytes are there, by name and size alone.

        Raises:
            ServerError: the store cannot be asked now.
        """
        with self._reading(ref):
            return await asyncio.to_thread(self._place.find, _key(ref), ref.size) is not None

    async def free(self, ref: BlobRef, *, unused_s: float) -> bool:
        """Delete bytes that nobody has put for ``unused_s``; whether they are gone.

        The caller knows that nothing refers to them.

        Raises:
            ServerError: the store cannot be written.
        """
        try:
            return await asyncio.to_thread(self._place.free, _key(ref), unused_s)
        except _FAULTS as exc:
            raise write_error(exc, self.where) from exc

    async def stored(self) -> list[Stored]:
        """Everything that is there. Raises ServerError when the store cannot be listed."""
        try:
            return await asyncio.to_thread(lambda: list(self._place.stored()))
        except _FAULTS as exc:
            msg = f"blob store {self.where} cannot be listed: {told(exc)}"
            raise ServerError(msg) from exc

    async def leftovers(self, *, older_s: float, remove: bool) -> int:
        """Bytes of writes that died ``older_s`` ago or earlier; see ``Place``.

        Raises:
            ServerError: the store cannot be written.
        """
        try:
            return await asyncio.to_thread(self._place.leftovers, older_s, remove=remove)
        except _FAULTS as exc:
            raise write_error(exc, self.where) from exc


def _key(ref: BlobRef) -> str:
    return f"{ref.blake3[:2]}/{ref.blake3[2:]}"


async def _digest(data: bytes) -> str:
    if len(data) < HASH_IN_THREAD_BYTES:
        return blake3(data).hexdigest()
    return await asyncio.to_thread(lambda: blake3(data).hexdigest())

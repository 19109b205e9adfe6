"""The blob store: bytes named by their blake3, written once, verified at every read.

obstore is called on threads of ours, never through its asyncio functions: those end on threads of
its own that still want the interpreter after the result is there, and a process that exits in
that moment is aborted.
"""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from blake3 import blake3
from obstore.store import LocalStore, from_url

from tinsmith.blobs import trash
from tinsmith.errors import BlobMissing, ServerError, StartupError, StorageFull
from tinsmith.messages.base import BlobRef

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from obstore.store import ObjectStore

READ_BYTES = 1 << 20  # in one piece, when a part is read in pieces
HASH_IN_THREAD_BYTES = 1 << 20  # below this, hashing is cheaper than a thread hop


class BlobStore:
    """A flat, content-addressed store. Putting the same bytes twice stores them once."""

    def __init__(self, store: ObjectStore, *, folder: Path | None, where: str) -> None:
        self._store = store
        self._folder = folder  # set when the store is a local folder, which we must fsync
        self._where = where

    @classmethod
    def open(cls, url: str, *, default: Path) -> BlobStore:
        """Open ``url`` (file:///..., s3://bucket/prefix, memory:///), or the default folder.

        Raises:
            StartupError: the URL is not understood, or the folder cannot be made.
        """
        try:
            if url in ("", f"file://{default}"):
                return cls._open_folder(default)
            if url.startswith("file://"):
                return cls._open_folder(Path(url.removeprefix("file://")))
            return cls(from_url(url), folder=None, where=url)
        except (OSError, ValueError, obstore.exceptions.BaseError) as exc:
            msg = f"blobs.url: cannot open {url or str(default)!r}: {exc}"
            raise StartupError(msg) from exc

    @classmethod
    def _open_folder(cls, folder: Path) -> BlobStore:
        folder.mkdir(parents=True, exist_ok=True)
        trash.recover(folder)
        return cls(LocalStore(folder), folder=folder, where=str(folder))

    async def put(self, data: bytes) -> BlobRef:
        """Store ``data`` durably and name it.

        Raises:
            StorageFull: the disk or the quota is full; nothing is left half-written.
            ServerError: the store cannot be written for another reason.
        """
        ref = BlobRef(await _digest(data), len(data))
        key = _key(ref)
        try:
            if await self._has(key, ref.size) and await self._touch(key):
                return ref
            # In parts, a failed write to a folder leaves what it has written for a while.
            in_parts = False if self._folder is not None else None
            await asyncio.to_thread(obstore.put, self._store, key, data, use_multipart=in_parts)
            if self._folder is not None:
                await asyncio.to_thread(_fsync, self._folder / key)
        except (OSError, obstore.exceptions.BaseError) as exc:
            raise self._write_error(exc) from exc
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes that ``ref`` names, verified.

        Raises:
            BlobMissing: they are absent, or not the bytes that were stored.
            ServerError: the store cannot be read now; it may come back.
        """
        with self._reading(ref):
            data = await asyncio.to_thread(self._read, _key(ref))
        if len(data) != ref.size or await _digest(data) != ref.blake3:
            msg = f"blob {ref.blake3} in {self._where} is damaged: its bytes have another digest"
            raise BlobMissing(msg)
        return data

    async def read(self, ref: BlobRef, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from ``start`` to before ``end`` in pieces, unverified.

        Raises:
            BlobMissing: they are not there.
            ServerError: the store cannot be read now.
        """
        for first in range(start, end, READ_BYTES):
            yield await self._part(ref, first, min(first + READ_BYTES, end))

    async def _part(self, ref: BlobRef, start: int, end: int) -> bytes:
        with self._reading(ref):
            part = await asyncio.to_thread(
                obstore.get_range, self._store, _key(ref), start=start, end=end
            )
        return bytes(part)

    @contextmanager
    def _reading(self, ref: BlobRef) -> Iterator[None]:
        """Says in our words why the bytes of ``ref`` cannot be read."""
        try:
            yield
        except FileNotFoundError as exc:
            msg = f"blob {ref.blake3} ({ref.size} bytes) is not in {self._where}"
            raise BlobMissing(msg) from exc
        except (OSError, obstore.exceptions.BaseError) as exc:
            msg = f"blob store {self._where} cannot be read: {exc}"
            raise ServerError(msg) from exc

    def _read(self, key: str) -> bytes:
        return bytes(obstore.get(self._store, key).bytes())

    async def has(self, ref: BlobRef) -> bool:
        """Whether the bytes are there, by name and size alone."""
        return await self._has(_key(ref), ref.size)

    @property
    def can_free(self) -> bool:
        """Whether ``free`` ever deletes anything."""
        return self._folder is not None

    async def free(self, ref: BlobRef, *, unused_s: float) -> bool:
        """Delete bytes that nobody has put for ``unused_s``; whether they are gone.

        The caller knows that nothing refers to them. Only a folder can be freed: an object store
        has no way to delete on the condition that nobody has put the same bytes meanwhile.

        Raises:
            ServerError: the folder cannot be written.
        """
        if self._folder is None:
            return False
        try:
            return await asyncio.to_thread(trash.free, self._folder, _key(ref), unused_s)
        except OSError as exc:
            raise self._write_error(exc) from exc

    async def _touch(self, key: str) -> bool:
        """Mark bytes as put just now, which keeps ``free`` off; False when they are gone."""
        if self._folder is None:
            return True
        return await asyncio.to_thread(trash.touch, self._folder / key)

    async def _has(self, key: str, size: int) -> bool:
        try:
            return (await asyncio.to_thread(obstore.head, self._store, key))["size"] == size
        except FileNotFoundError:
            return False

    def _write_error(self, exc: Exception) -> ServerError:
        full = os.strerror(errno.ENOSPC)
        if full in str(exc):
            return StorageFull(
                f"blob store {self._where} is full ({full}); free space or move it, then retry"
            )
        return ServerError(f"blob store {self._where} cannot be written: {exc}")


def _key(ref: BlobRef) -> str:
    return f"{ref.blake3[:2]}/{ref.blake3[2:]}"


async def _digest(data: bytes) -> str:
    if len(data) < HASH_IN_THREAD_BYTES:
        return blake3(data).hexdigest()
    return await asyncio.to_thread(lambda: blake3(data).hexdigest())


def _fsync(path: Path) -> None:
    """Make a new file and its directory entry survive a power cut."""
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

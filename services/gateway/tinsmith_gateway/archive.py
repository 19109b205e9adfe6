"""A checkpoint as one tar file that is never held in memory, nor written anywhere."""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tinsmith.blobs import BlobStore
    from tinsmith.messages.base import BlobRef

_END = bytes(2 * tarfile.BLOCKSIZE)


class Archive:
    """The same parts always give the same bytes."""

    def __init__(self, parts: Mapping[str, BlobRef], *, created_s: int) -> None:
        self._pieces: list[bytes | BlobRef] = []
        for name in sorted(parts):
            ref = parts[name]
            header = tarfile.TarInfo(name)
            header.size, header.mtime = ref.size, created_s
            padding = bytes(-ref.size % tarfile.BLOCKSIZE)
            self._pieces += [header.tobuf(tarfile.GNU_FORMAT), ref, padding]
        self._pieces.append(_END)

    @property
    def size(self) -> int:
        """Of the whole file in bytes."""
        return sum(map(_size, self._pieces))

    async def read(self, blobs: BlobStore, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from ``start`` to before ``end``, in pieces. Raises as ``BlobStore.read``."""
        offset = 0
        for piece in self._pieces:
            first, last = max(start - offset, 0), min(end - offset, _size(piece))
            offset += _size(piece)
            if first >= last:
                continue
            if isinstance(piece, bytes):
                yield piece[first:last]
            else:
                async for data in blobs.read(piece, first, last):
                    yield data


def _size(piece: bytes | BlobRef) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.size

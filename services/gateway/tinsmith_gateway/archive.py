"""What is downloaded, a file or all of a checkpoint, never held in memory nor written anywhere."""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tinsmith.blobs import BlobStore
    from tinsmith.messages.base import BlobRef

_END = bytes(2 * tarfile.BLOCKSIZE)


class Content:
    """Pieces one after the other: some here, some in the blob store."""

    def __init__(self, pieces: Sequence[bytes | BlobRef], content_type: str) -> None:
        self._pieces = pieces
        self.content_type = content_type

    @property
    def size(self) -> int:
        """Of the whole in bytes."""
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


def archive(parts: Mapping[str, BlobRef], *, created_s: int) -> Content:
    """All ``parts`` as a tar file; the same ones always give the same bytes."""
    pieces: list[bytes | BlobRef] = []
    for name in sorted(parts):
        ref = parts[name]
        header = tarfile.TarInfo(name)
        header.size, header.mtime = ref.size, created_s
        padding = bytes(-ref.size % tarfile.BLOCKSIZE)
        pieces += [header.tobuf(tarfile.GNU_FORMAT), ref, padding]
    return Content([*pieces, _END], "application/x-tar")


def single(ref: BlobRef) -> Content:
    """One part as it is."""
    return Content([ref], "application/octet-stream")


def _size(piece: bytes | BlobRef) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.size

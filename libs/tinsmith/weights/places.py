"""Where chunks lie: a lineage's in a stream of the broker, a run's in the blob store.

Whoever writes and reads whole states and deltas knows only ``Chunks``. A chunk is named by what it
is, and proven by whoever gets it, so that it does not matter which of the places it comes from.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from tinsmith.blobs import BlobStore
    from tinsmith.bus.chunks import ChunkStore
    from tinsmith.messages.base import BlobRef

WINDOW = 4
"""Chunks on their way at a time, each way."""

BLOB_BYTES = 16 << 20
"""A chunk in the blob store. Larger ones cost more: their memory is new every time."""

MOST_BLOBS = 1024
"""About so many chunks at most, of which each costs a reference in the log's entry."""


class Source(Protocol):
    """Where chunks come from."""

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes that ``ref`` names, proven.

        Raises:
            BlobMissing: they are not there, or are not the bytes that were stored.
            ServerError: the place cannot be asked now.
        """


class Chunks(Source, Protocol):
    """A place for chunks."""

    @property
    def limit(self) -> int:
        """Bytes of the largest chunk."""

    async def put(self, data: bytes) -> BlobRef:
        """Store ``data`` durably; StorageFull, or another ServerError of the place."""


class StreamChunks:
    """A lineage's chunks."""

    def __init__(self, store: ChunkStore, lineage_id: str) -> None:
        self._store = store
        self._lineage_id = lineage_id
        self._seqs: list[int] = []

    @property
    def limit(self) -> int:
        """See ``Chunks``."""
        return self._store.limit

    @property
    def first(self) -> int:
        """The lowest stream sequence of what was put here."""
        return min(self._seqs)

    async def put(self, data: bytes) -> BlobRef:
        """See ``Chunks``; BrokerUnavailable when the broker stayed away."""
        put = await self._store.put(self._lineage_id, data)
        self._seqs.append(put.stream_seq)
        return put.ref

    async def get(self, ref: BlobRef) -> bytes:
        """See ``Chunks``; BrokerUnavailable when there is no answer."""
        return await self._store.get(self._lineage_id, ref)


class BlobChunks:
    """Chunks as blobs, which are kept for as long as something refers to them."""

    def __init__(self, blobs: BlobStore, size_bytes: int = 0) -> None:
        """For a state of about ``size_bytes``."""
        self.limit = max(BLOB_BYTES, size_bytes // MOST_BLOBS)
        self._blobs = blobs

    async def put(self, data: bytes) -> BlobRef:
        """See ``Chunks``."""
        return await self._blobs.put(data)

    async def get(self, ref: BlobRef) -> bytes:
        """See ``Chunks``."""
        return await self._blobs.get(ref)


async def in_order(chunks: Source, refs: Sequence[BlobRef]) -> AsyncGenerator[bytes]:
    """The chunks of ``refs`` in their order, some of them ahead; raises as ``get``."""
    tasks: list[asyncio.Task[bytes]] = []
    try:
        for number in range(len(refs)):
            ahead = refs[number + len(tasks) : number + WINDOW]
            tasks += [asyncio.create_task(chunks.get(ref)) for ref in ahead]
            yield await tasks[0]
            del tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

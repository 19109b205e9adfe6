"""Sending the chunks of an entry: cut while others are on their way, the manifest last."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.weights.body import BodyWriter, Manifest, encode_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tinsmith.bus.chunks import ChunkStore, Put
    from tinsmith.messages.base import BlobRef
    from tinsmith.weights.body import Whole
    from tinsmith.weights.specs import TensorSpec

WINDOW = 4  # chunks on their way at a time


class Sent(NamedTuple):
    """Chunks that are durable; what an entry says of them."""

    manifest: tuple[BlobRef, ...]
    size: int  # bytes
    first_chunk: int  # the lowest of their stream sequences


async def send(
    chunks: ChunkStore,
    lineage_id: str,
    wholes: Iterable[Whole],
    specs: Mapping[str, TensorSpec] | None = None,
) -> Sent:
    """Put the chunks of ``wholes``, which are encoded as they are taken; ``specs`` if it is all.

    Raises:
        BrokerUnavailable, StorageFull: some of them may be there, and mean nothing.
    """
    sender = _Sender(chunks, lineage_id)
    body, left = BodyWriter(chunks.limit), iter(wholes)
    try:
        while ready := await asyncio.to_thread(_next, body, left):
            for chunk in ready:
                await sender.put(chunk)
        for chunk in body.finish():
            await sender.put(chunk)
        manifest = Manifest(
            specs=dict(specs or {}), tensors=tuple(body.tensors), chunks=await sender.refs()
        )
        before = len(manifest.chunks)
        for piece in encode_manifest(manifest, chunks.limit):
            await sender.put(piece)
        return Sent((await sender.refs())[before:], sender.size, sender.first)
    finally:
        await sender.stop()


def _next(body: BodyWriter, left: Iterable[Whole]) -> list[bytes] | None:
    """The next chunks that are complete; None at the end."""
    for whole in left:
        if ready := list(body.add(whole)):
            return ready
    return None


class _Sender:
    """Puts chunks in order, some at a time."""

    def __init__(self, chunks: ChunkStore, lineage_id: str) -> None:
        self._chunks = chunks
        self._lineage_id = lineage_id
        self._tasks: list[asyncio.Task[Put]] = []
        self._put: list[Put] = []
        self.size = 0

    @property
    def first(self) -> int:
        return min(put.stream_seq for put in self._put)

    async def put(self, data: bytes) -> None:
        """Start to put ``data``; waits for others when too many are on their way."""
        if len(self._tasks) == WINDOW:
            self._put.append(await self._tasks[0])
            del self._tasks[0]
        self.size += len(data)
        put = self._chunks.put(self._lineage_id, data)
        self._tasks.append(asyncio.create_task(put, name=f"chunk of {self._lineage_id}"))

    async def refs(self) -> tuple[BlobRef, ...]:
        """Of all that were put, when all of them are durable."""
        while self._tasks:
            self._put.append(await self._tasks[0])
            del self._tasks[0]
        return tuple(put.ref for put in self._put)

    async def stop(self) -> None:
        """End what is on its way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

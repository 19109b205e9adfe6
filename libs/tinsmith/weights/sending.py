"""Sending the chunks of an entry: cut while others are on their way, the manifest last."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.weights.body import BodyWriter, Manifest, encode_manifest
from tinsmith.weights.places import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tinsmith.messages.base import BlobRef
    from tinsmith.weights.body import Whole
    from tinsmith.weights.places import Chunks
    from tinsmith.weights.specs import TensorSpec


class Sent(NamedTuple):
    """What is durable; what an entry says of it."""

    manifest: tuple[BlobRef, ...]
    chunks: tuple[BlobRef, ...]
    size: int  # bytes of both


async def send(
    chunks: Chunks,
    wholes: Iterable[Whole],
    specs: Mapping[str, TensorSpec] | None = None,
) -> Sent:
    """Put the chunks of ``wholes``, which are encoded as they are taken; ``specs`` if it is all.

    Raises:
        ServerError: as ``Chunks.put``; some of them may be there, and mean nothing.
    """
    sender = _Sender(chunks)
    body = BodyWriter(chunks.limit)
    left = _cut(body, wholes)
    try:
        while (chunk := await asyncio.to_thread(next, left, None)) is not None:
            await sender.put(chunk)
        manifest = Manifest(
            specs=dict(specs or {}), tensors=tuple(body.tensors), chunks=await sender.refs()
        )
        before = len(manifest.chunks)
        for piece in encode_manifest(manifest, chunks.limit):
            await sender.put(piece)
        return Sent((await sender.refs())[before:], manifest.chunks, sender.size)
    finally:
        await sender.stop()


def _cut(body: BodyWriter, wholes: Iterable[Whole]) -> Iterator[bytes]:
    for whole in wholes:
        yield from body.add(whole)
    yield from body.finish()


class _Sender:
    """Puts chunks in order, some at a time."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._tasks: list[asyncio.Task[BlobRef]] = []
        self._put: list[BlobRef] = []
        self.size = 0

    async def put(self, data: bytes) -> None:
        """Start to put ``data``; waits for others when too many are on their way."""
        if len(self._tasks) == WINDOW:
            self._put.append(await self._tasks[0])
            del self._tasks[0]
        self.size += len(data)
        self._tasks.append(asyncio.create_task(self._chunks.put(data), name="chunk"))

    async def refs(self) -> tuple[BlobRef, ...]:
        """Of all that were put, when all of them are durable."""
        while self._tasks:
            self._put.append(await self._tasks[0])
            del self._tasks[0]
        return tuple(self._put)

    async def stop(self) -> None:
        """End what is on its way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

"""Fetching what entries name: their manifests and chunks, as deltas or as a whole state."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from tinsmith.errors import BlobMissing, InvalidRequest
from tinsmith.weights import wholes
from tinsmith.weights.body import BodyReader, decode_manifest
from tinsmith.weights.delta import Delta
from tinsmith.weights.places import StreamChunks, in_order
from tinsmith.weights.state import WrongBits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tinsmith.bus.chunks import ChunkStore
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.weights import WeightsStored
    from tinsmith.weights.body import Whole
    from tinsmith.weights.state import WeightState

R = TypeVar("R")

TRIES = 4
"""A chunk that is damaged or not there is asked for again before its entry is given up: at another
site the chain may be ahead of the chunks."""


class Unusable(Exception):
    """An entry's chunks are gone or damaged, or do not hold what the entry says."""

    def __init__(self, stored: WeightsStored, cause: Exception) -> None:
        super().__init__(f"{stored.form} {stored.version} of {stored.lineage_id}: {cause}")
        self.stored = stored


class Fetcher:
    """Reads the entries of one receiver."""

    def __init__(self, chunks: ChunkStore, *, retry_s: float) -> None:
        self._chunks = chunks
        self._retry_s = retry_s
        self.received_bytes = 0
        """Of chunks, since it was made."""

    async def delta(self, stored: WeightsStored) -> Delta:
        """A ``delta`` or ``skip``.

        Raises:
            Unusable: it cannot be had.
            BrokerUnavailable: the broker is away.
        """
        read = await self._tried(stored, lambda: _changes(self._source(stored), stored.manifest))
        changes = {whole.name: whole.change for whole in read}
        digests = {whole.name: whole.digest for whole in read}
        return Delta(stored.base_root, stored.root, changes, digests)

    async def state(self, stored: WeightsStored) -> WeightState:
        """A whole state, proven. Raises as ``delta``."""
        return await self._tried(
            stored, lambda: wholes.fetch(self._source(stored), stored.manifest, stored.root)
        )

    async def _tried(self, stored: WeightsStored, read: Callable[[], Awaitable[R]]) -> R:
        for tries_left in reversed(range(TRIES)):
            try:
                return await read()
            except (WrongBits, InvalidRequest) as exc:
                # Its chunks are what was put: nothing else will come.
                raise Unusable(stored, exc) from exc
            except BlobMissing as exc:
                if not tries_left:
                    raise Unusable(stored, exc) from exc
                await asyncio.sleep(self._retry_s)
        raise AssertionError

    def _source(self, stored: WeightsStored) -> _Counted:
        return _Counted(self, StreamChunks(self._chunks, stored.lineage_id))


class _Counted:
    """Tells a fetcher how much comes from its lineage."""

    def __init__(self, fetcher: Fetcher, chunks: StreamChunks) -> None:
        self._fetcher = fetcher
        self._chunks = chunks

    async def get(self, ref: BlobRef) -> bytes:
        data = await self._chunks.get(ref)
        self._fetcher.received_bytes += len(data)
        return data


async def _changes(chunks: _Counted, manifest: Sequence[BlobRef]) -> list[Whole]:
    listed = decode_manifest([piece async for piece in in_order(chunks, manifest)])
    body = BodyReader(listed.tensors)
    found: list[Whole] = []
    async with aclosing(in_order(chunks, listed.chunks)) as coming:
        async for chunk in coming:
            found += body.feed(chunk)
    return [*found, *body.finish()]

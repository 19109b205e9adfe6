"""Fetching what entries name: their manifests and chunks, as deltas or as a whole state."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from tinsmith.errors import BlobMissing, InvalidRequest
from tinsmith.weights.body import BodyReader, decode_manifest
from tinsmith.weights.delta import Delta
from tinsmith.weights.state import WeightState, WrongBits
from tinsmith.weights.streams import DamagedStream

if TYPE_CHECKING:
    from tinsmith.bus.chunks import ChunkStore
    from tinsmith.messages.weights import WeightsStored
    from tinsmith.weights.body import Manifest, Whole

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
        _, wholes = await self._wholes(stored)
        changes = {whole.name: whole.change for whole in wholes}
        digests = {whole.name: whole.digest for whole in wholes}
        return Delta(stored.base_root, stored.root, changes, digests)

    async def state(self, stored: WeightsStored) -> WeightState:
        """A whole state, proven. Raises as ``delta``."""
        manifest, wholes = await self._wholes(stored)
        try:
            state = await asyncio.to_thread(WeightState.read, manifest.specs, wholes)
        except (WrongBits, InvalidRequest) as exc:
            raise Unusable(stored, exc) from exc
        if state.root != stored.root:
            raise Unusable(stored, WrongBits(f"the state is {state.root}, not {stored.root}"))
        return state

    async def _wholes(self, stored: WeightsStored) -> tuple[Manifest, list[Whole]]:
        for tries_left in reversed(range(TRIES)):
            try:
                return await self._read(stored)
            except DamagedStream as exc:  # its chunks are what was put: nothing else will come
                raise Unusable(stored, exc) from exc
            except BlobMissing as exc:
                if not tries_left:
                    raise Unusable(stored, exc) from exc
                await asyncio.sleep(self._retry_s)
        raise AssertionError

    async def _read(self, stored: WeightsStored) -> tuple[Manifest, list[Whole]]:
        pieces = [chunk async for chunk in self._chunks.all(stored.lineage_id, stored.manifest)]
        self.received_bytes += sum(map(len, pieces))
        manifest = decode_manifest(pieces)
        body = BodyReader(manifest.tensors)
        wholes: list[Whole] = []
        chunks = self._chunks.all(stored.lineage_id, manifest.chunks)
        async with aclosing(chunks):
            async for chunk in chunks:
                self.received_bytes += len(chunk)
                wholes += body.feed(chunk)
        return manifest, [*wholes, *body.finish()]

"""Whole states as chunks of any place: proven by what reads them, before they are used."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from tinsmith.weights.body import BodyReader, decode_manifest
from tinsmith.weights.places import in_order
from tinsmith.weights.state import StateReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinsmith.messages.base import BlobRef
    from tinsmith.weights.bits import Bits
    from tinsmith.weights.body import Manifest
    from tinsmith.weights.places import Source
    from tinsmith.weights.state import WeightState


class WholeReader:
    """Makes one state of chunks, holding none of them."""

    def __init__(self, manifest: Manifest, into: Mapping[str, Bits] | None = None) -> None:
        """``into`` as of ``StateReader``; DamagedStream for a manifest that cannot be."""
        self._body = BodyReader(manifest.tensors)
        self._state = StateReader(manifest.specs, into)

    def feed(self, chunk: bytes) -> None:
        """The next chunk, in the manifest's order; WrongBits or DamagedStream if it is another."""
        for whole in self._body.feed(chunk):
            self._state.take(whole)

    def finish(self, root: str) -> WeightState:
        """The state that ``root`` names; raises as ``feed``."""
        for whole in self._body.finish():
            self._state.take(whole)
        return self._state.finish(root)


async def fetch(chunks: Source, manifest: Sequence[BlobRef], root: str) -> WeightState:
    """The state that ``root`` names, whose manifest lies in ``chunks`` in these pieces.

    Raises:
        BlobMissing, ServerError: as ``Source.get``.
        WrongBits, DamagedStream: it is another.
        InvalidRequest: it cannot be one.
    """
    listed = decode_manifest([piece async for piece in in_order(chunks, manifest)])
    reader = WholeReader(listed)
    async with aclosing(in_order(chunks, listed.chunks)) as found:
        async for chunk in found:
            await asyncio.to_thread(reader.feed, chunk)
    return await asyncio.to_thread(reader.finish, root)

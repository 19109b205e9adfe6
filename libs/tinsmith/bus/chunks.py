"""Chunks of weights: bytes under the digest of them, in a stream that every site can mirror.

A chunk that is put again is the same chunk, newer in the stream. A reader proves what it gets, so
that it does not matter who wrote it, how often, or in which order.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from tinsmith import ids
from tinsmith.bus.wire import TRANSIENT, last, publish
from tinsmith.errors import BlobMissing, BrokerUnavailable
from tinsmith.messages.base import BlobRef
from tinsmith.messages.table import CHUNK_STREAM, CHUNK_TEMPLATE

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

CHUNK_BYTES = 4 << 20
"""Larger ones hold up what else is on the connection; smaller ones cost a sync to disk each."""
_ENVELOPE = 4096  # subject, headers and what the broker adds to an answer


class Put(NamedTuple):
    """A chunk that is durable."""

    ref: BlobRef
    stream_seq: int


class ChunkStore:
    """The chunks of all lineages."""

    def __init__(self, connection: tuple[Client, JetStreamContext]) -> None:
        self._connection = connection
        self._client, self._js = connection

    @property
    def limit(self) -> int:
        """Bytes of the largest chunk that the broker takes."""
        return min(CHUNK_BYTES, self._client.max_payload - _ENVELOPE)

    async def put(self, lineage_id: str, data: bytes) -> Put:
        """Store ``data`` durably.

        Raises:
            BrokerUnavailable: the broker stayed away.
            StorageFull: it has no room.
        """
        digest = await asyncio.to_thread(lambda: blake3(data).hexdigest())
        seq = await publish(self._connection, _subject(lineage_id, digest), data)
        return Put(BlobRef(digest, len(data)), seq)

    async def get(self, lineage_id: str, ref: BlobRef) -> bytes:
        """The bytes that ``ref`` names, proven.

        Raises:
            BlobMissing: they were forgotten, or are not the bytes that were stored.
            BrokerUnavailable: no answer.
        """
        found = await last(self._js, CHUNK_STREAM, _subject(lineage_id, ref.blake3))
        if found is None:
            msg = f"chunk {ref.blake3} ({ref.size} bytes) of {lineage_id} is not kept any more"
            raise BlobMissing(msg)
        data = found.data or b""
        digest = await asyncio.to_thread(lambda: blake3(data).hexdigest())
        if (digest, len(data)) != (ref.blake3, ref.size):
            msg = f"chunk {ref.blake3} of {lineage_id} is damaged: its bytes have another digest"
            raise BlobMissing(msg)
        return data

    async def forget(self, lineage_id: str, *, before: int) -> None:
        """Delete the lineage's chunks below stream sequence ``before``.

        Raises:
            BrokerUnavailable: the broker did not confirm it.
        """
        try:
            await self._js.purge_stream(CHUNK_STREAM, seq=before, subject=_subject(lineage_id, "*"))
        except TRANSIENT as exc:
            msg = f"the broker did not forget chunks of {lineage_id} ({type(exc).__name__})"
            raise BrokerUnavailable(msg) from exc


def _subject(lineage_id: str, digest: str) -> str:
    return CHUNK_TEMPLATE.subject(lineage=ids.token(lineage_id), digest=digest)

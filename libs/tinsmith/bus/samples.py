"""The log of samples: what was drawn from a run's weights, each request once, the oldest first out.

A subject is a request's address. An append expects its subject to be empty, so that of several
attempts at one request the first stays; and since the stream takes more than one message of a
subject, nobody can put another in the place of one that is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinsmith import ids
from tinsmith.bus.claims import check_in, resolve
from tinsmith.bus.history import count, kept
from tinsmith.bus.wire import ERR_WRONG_LAST_SEQUENCE, Rejected, publish
from tinsmith.messages.table import SAMPLE_LOG_STREAM, SAMPLE_LOG_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from tinsmith.blobs import BlobStore


class SampleAddress(NamedTuple):
    """Where a record is kept: whose weights, and the request."""

    run: str
    sampler_id: str
    seq: int


class SampleLog:
    """Records as the bytes they are; at most one for each address."""

    def __init__(self, connection: tuple[Client, JetStreamContext], blobs: BlobStore) -> None:
        self._connection = connection
        self._js = connection[1]
        self._blobs = blobs

    async def append(self, address: SampleAddress, record: bytes) -> bool:
        """Append ``record``; False when there is one already, which stays.

        Raises:
            StorageFull, Rejected: the stream or the blob store does not take it.
            BrokerUnavailable: the broker stayed away; whether it is there is unknown.
        """
        payload, headers = await check_in(record, self._blobs)
        headers["Nats-Expected-Last-Subject-Sequence"] = "0"
        try:
            await publish(self._connection, subject_of(address), payload, headers=headers)
        except Rejected as exc:
            if exc.code != ERR_WRONG_LAST_SEQUENCE:
                raise
            return False
        return True

    async def stored(self, run: str) -> AsyncIterator[tuple[str, bytes]]:
        """Subject and bytes of every record of ``run``, in order, up to the present last.

        Raises:
            BlobMissing: those of a large one are not in the blob store.
            BrokerUnavailable: the broker was silent for too long.
        """
        async for msg in kept(self._connection, SAMPLE_LOG_STREAM, _filter(run)):
            _, data = await resolve(msg, self._blobs)
            yield msg.subject, data

    async def since(self, first: int) -> AsyncIterator[tuple[int, bytes]]:
        """Stream sequence and bytes of every run's records from ``first`` on; else as above."""
        every = SAMPLE_LOG_TEMPLATE.wildcard
        async for msg in kept(self._connection, SAMPLE_LOG_STREAM, every, first=first):
            _, data = await resolve(msg, self._blobs)
            yield msg.metadata.sequence.stream, data

    async def count(self, run: str) -> int:
        """How many records ``run`` has now."""
        return await count(self._js, SAMPLE_LOG_STREAM, _filter(run))


def subject_of(address: SampleAddress) -> str:
    """Where the record of ``address`` is kept."""
    run, sampler_id, seq = address
    return SAMPLE_LOG_TEMPLATE.subject(
        run=ids.token(run), sampler=ids.token(sampler_id), seq=str(seq)
    )


def _filter(run: str) -> str:
    return SAMPLE_LOG_TEMPLATE.subject(run=ids.token(run), sampler="*", seq="*")

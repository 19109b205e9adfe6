"""Append-only hash chains in a stream: each entry names the one before it, and no two writers fork.

Every append expects the sequence of the entry before it (compare-and-set over all subjects of
the chain), which gives order, fencing and exactly-once effect in one write.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import structlog
from blake3 import blake3

from tinsmith.bus.consumers import reading_consumer
from tinsmith.bus.pull import ConsumerGone, Pull
from tinsmith.bus.wire import (
    ERR_WRONG_LAST_SEQUENCE,
    RETRY_PAUSE_S,
    TRANSIENT,
    Rejected,
    last,
    publish,
)
from tinsmith.errors import Fenced, ServerError
from tinsmith.messages.base import GENESIS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nats.aio.client import Client
    from nats.js import JetStreamContext

log = structlog.get_logger(__name__)

FOLLOW_BATCH = 100


class Tip(NamedTuple):
    """Where a chain ends: its last entry."""

    stream_seq: int = 0  # 0: no entry yet
    blake3: str = GENESIS  # of the entry's bytes


class Subjects(NamedTuple):
    """The subjects of one chain: a stream, and a filter over all of them."""

    stream: str
    matching: str


class Chain:
    """Appends to one chain, from the tip that the writer knows."""

    def __init__(
        self,
        connection: tuple[Client, JetStreamContext],
        subjects: Subjects,
        tip: Tip,
        *,
        name: str,
        patience_s: float | None = None,
    ) -> None:
        """``name`` says in errors whose chain it is; ``patience_s`` as in ``wire.publish``."""
        self.tip = tip
        """Of the last append, or where it began."""
        self._connection = connection
        self._subjects = subjects
        self._name = name
        self._patience_s = patience_s
        self._turn = asyncio.Lock()  # one append at a time: each names the one before it

    async def append(
        self, subject: str, make: Callable[[str], bytes], *, headers: dict[str, str] | None = None
    ) -> Tip:
        """Append what ``make`` gives for the digest of the last entry; the new tip.

        The same bytes may be appended again after a failure: they are there once.

        Raises:
            Fenced: another writer has appended; this one's tip is void.
            BrokerUnavailable: the broker stayed away; whether it was appended is unknown.
            StorageFull: the broker has no room.
        """
        async with self._turn:
            data = make(self.tip.blake3)
            digest = blake3(data).hexdigest()
            expected = (headers or {}) | {
                "Nats-Expected-Last-Subject-Sequence": str(self.tip.stream_seq),
                "Nats-Expected-Last-Subject-Sequence-Subject": self._subjects.matching,
            }
            try:
                stream_seq = await publish(
                    self._connection, subject, data, headers=expected, patience_s=self._patience_s
                )
            except Rejected as exc:
                if exc.code != ERR_WRONG_LAST_SEQUENCE:
                    raise
                stream_seq = await self._ours(subject, digest)
            self.tip = Tip(stream_seq, digest)
            return self.tip

    async def _ours(self, subject: str, digest: str) -> int:
        """A refused append may be our own, whose acknowledgement was lost."""
        found = await last(self._connection[1], *self._subjects)
        if found is not None and blake3(found.data or b"").hexdigest() == digest:
            return found.seq or 0
        msg = f"{self._name}: another owner has written to the log; {subject} is refused"
        raise Fenced(msg)


class CutChain(ServerError):
    """A chain ends before what was read of it: it is another one than it was."""


class Link(NamedTuple):
    """One entry of a chain, as it is kept."""

    stream_seq: int
    subject: str
    data: bytes


async def follow(
    connection: tuple[Client, JetStreamContext], subjects: Subjects, *, first: int
) -> AsyncIterator[Link]:
    """Every entry from stream sequence ``first`` on, as it is appended, until the caller stops.

    Each comes once and in order. What a broken connection has swallowed is not missed: whenever
    the consumer is made anew it starts behind the last entry that was yielded. The caller sees a
    gap by the digests, and starts again.

    Raises:
        CutChain: the stream has not even what came before ``first``.
        BrokerUnavailable: the broker stayed away.
    """
    client, js = connection
    while True:
        try:
            end = await last(js, *subjects)
            if (0 if end is None else end.seq or 0) < first - 1:
                reason = f"{subjects.matching} ends before entry {first - 1}, which was read"
                raise CutChain(reason)
            wanted = reading_consumer(subjects.matching, first)
            info = await js.add_consumer(subjects.stream, wanted)
            pull = Pull(client, subjects.stream, info.name, batch=FOLLOW_BATCH)
            async for msg in pull.messages():
                seq = msg.metadata.sequence.stream
                if seq >= first:
                    first = seq + 1
                    yield Link(seq, msg.subject, msg.data)
        except ConsumerGone:
            continue
        except TRANSIENT as exc:
            if client.is_closed:  # nats-py makes an error of a cancellation then
                return
            log.warning("following interrupted", stream=subjects.stream, error=str(exc))
            await asyncio.sleep(RETRY_PAUSE_S * 5)

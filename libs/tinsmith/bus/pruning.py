"""Taking whole logs off the broker, in steps of which each can be repeated.

    mark in the registry, anchor that says so, purges, the mark says that it is over

Whoever finds no log finds the mark. A crash after it leaves work for whoever goes over the marks
next; a crash before it leaves the log. An anchor that is appended twice says the same twice.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from nats.js.errors import APIError

from tinsmith import ids
from tinsmith.bus.history import count, kept
from tinsmith.bus.table import Table
from tinsmith.bus.views import View
from tinsmith.bus.wire import TRANSIENT, last
from tinsmith.errors import BrokerUnavailable, ServerError
from tinsmith.messages import table
from tinsmith.messages.anchors import Head, PrunedLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from tinsmith.bus.anchors import Anchors
    from tinsmith.bus.log import CommitLog

_ERR_NOT_PERMITTED = 10110
_SIZE = "Nats-Msg-Size"  # what the broker says of a message without its body


class Pruning:
    """Of any run: its log, the log of its samples, the lineage of its weights."""

    def __init__(
        self, connection: tuple[Client, JetStreamContext], log: CommitLog, anchors: Anchors
    ) -> None:
        self._connection = connection
        self._js = connection[1]
        self._log = log
        self._anchors = anchors
        self._marks = Table(connection, table.PRUNED)
        self._lineages = Table(connection, table.LINEAGES)

    async def marks(self) -> dict[str, PrunedLog]:
        """All that was marked, by run. Raises BrokerUnavailable."""
        found: View[PrunedLog] = View(self._marks, lambda _: "")
        await (await found.watch()).close()
        return {entry.model_id: entry for entry in found}

    async def of(self, model_id: str) -> PrunedLog | None:
        """What is left of the run's log, if that was marked. Raises BrokerUnavailable."""
        return await self._marks.get(ids.token(model_id))

    async def mark(self, model_id: str, *, reason: str, by: str) -> PrunedLog | None:
        """Say that the run's log is taken away; what was said first stays. None: it has no log.

        Raises:
            BrokerUnavailable: the broker stayed away.
        """
        end = await self._log.head(model_id)
        if not end.stream_seq:
            return None
        newest = await self._log.newest(model_id)
        if not newest:  # another checkpointer, which has marked it, took it away meanwhile
            return None
        head = Head(
            model_id=model_id,
            place=newest[-1][0].partition(f"{ids.token(model_id)}.")[2],
            stream_seq=end.stream_seq,
            blake3=end.blake3,
        )
        entry = PrunedLog(
            model_id=model_id,
            pruned_ns=time.time_ns(),
            reason=reason,
            by=by,
            head=head,
            entries=await self._log.length(model_id),
            samples=await count(self._js, table.SAMPLE_LOG_STREAM, _samples(model_id)),
        )
        return await self._marks.create(ids.token(model_id), entry)

    async def remove(self, marked: Sequence[PrunedLog]) -> None:
        """Take away what is marked. Repeated after a failure, it ends what was begun.

        Raises:
            BrokerUnavailable, StorageFull: the broker stayed away, or has no room for the anchor.
        """
        await self._anchors.anchor()
        await self._anchors.note(marked)
        for entry in marked:
            for stream, subject in _places(entry.model_id):
                await self._purge(stream, subject)
            token = ids.token(entry.model_id)
            if await self._lineages.get(token) is not None:
                await self._lineages.delete(token)
            await self._marks.put(token, msgspec.structs.replace(entry, is_removed=True))

    async def require_allowed(self) -> None:
        """ServerError when a stream lets nothing be purged; BrokerUnavailable as above."""
        for stream, subject in _places("none"):
            await self._purge(stream, subject)

    async def is_counted(self, model_id: str) -> bool:
        """Whether the meter has read the run's last operation. BrokerUnavailable: no answer."""
        subject = table.LOG_TEMPLATE.subject(model=ids.token(model_id), kind="op", number="*")
        newest = await last(self._js, table.LOG_STREAM, subject)
        mark = await Table(self._connection, table.METER).get("log")
        return newest is None or (mark is not None and mark.stream_seq >= (newest.seq or 0))

    async def sizes(self) -> AsyncIterator[tuple[str, int]]:
        """Of each message of a log: whose it is, a model's or a session's, and its bytes.

        Raises:
            BrokerUnavailable: no answer.
        """
        for stream, subject in _places("*"):
            async for msg in kept(self._connection, stream, subject, headers_only=True):
                size = int((msg.headers or {}).get(_SIZE, 0))  # before the broker compresses it
                yield ids.of_token(msg.subject.split(".")[3]), size

    async def _purge(self, stream: str, subject: str) -> None:
        try:
            await self._js.purge_stream(stream, subject=subject)
        except APIError as exc:
            if exc.err_code != _ERR_NOT_PERMITTED:
                raise BrokerUnavailable(f"{stream} was not purged: {exc.description}") from exc
            raise ServerError(
                f"{stream} on the broker lets nobody purge it, which cannot be changed in place: "
                "it was made so by its operator or by an earlier version; no log of it is pruned"
            ) from exc
        except TRANSIENT as exc:
            msg = f"the broker did not say whether {stream} was purged ({type(exc).__name__})"
            raise BrokerUnavailable(msg) from exc


def _samples(model_id: str) -> str:
    return table.SAMPLE_LOG_TEMPLATE.subject(run=ids.token(model_id), sampler="*", seq="*")


def _places(model_id: str) -> tuple[tuple[str, str], ...]:
    """Streams, and what they have of a run; the log last, by which the run is found."""
    token = ids.token(model_id)
    return (
        (table.SAMPLE_LOG_STREAM, _samples(model_id)),
        (table.CHUNK_STREAM, table.CHUNK_TEMPLATE.subject(lineage=token, digest="*")),
        (
            table.LINEAGE_STREAM,
            table.LINEAGE_TEMPLATE.subject(lineage=token, kind="*", number="*"),
        ),
        (table.LOG_STREAM, table.LOG_TEMPLATE.subject(model=token, kind="*", number="*")),
    )

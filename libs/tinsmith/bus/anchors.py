"""The chain of anchors: where logs ended, in a stream of its own that nothing can be taken from.

Any number of checkpointers may append: each anchor continues from where the newest one ended,
and compare-and-set over the whole stream keeps the chain from forking. Finding the logs that
grew takes the subjects of the new entries, without their bytes, and one read for each such log.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import structlog
from blake3 import blake3

from tinsmith import ids
from tinsmith.bus.chain import Chain, Subjects, Tip
from tinsmith.bus.history import kept, stretch
from tinsmith.bus.table import Table
from tinsmith.bus.wire import at, last
from tinsmith.errors import Fenced
from tinsmith.messages.anchors import Anchor, Head
from tinsmith.messages.base import decoder, encode
from tinsmith.messages.table import (
    ANCHOR_STREAM,
    ANCHOR_TEMPLATE,
    LOG_STREAM,
    LOG_TEMPLATE,
    PRUNED,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from tinsmith.messages.anchors import PrunedLog

log = structlog.get_logger(__name__)

MAX_HEADS = 2000  # some 500 KB; what more logs have grown goes into the next anchor

_ANCHORS = decoder(Anchor)


class _End(NamedTuple):
    """Where the chain ends."""

    number: int = 0
    through: int = 0  # in the log's stream
    tip: Tip = Tip()
    last: Head | None = None  # the last entry that is covered


class Anchors:
    """Reads the chain, and appends to it."""

    def __init__(self, connection: tuple[Client, JetStreamContext]) -> None:
        self._connection = connection
        self._js = connection[1]
        self._pruned = Table(connection, PRUNED)

    async def stored(self) -> AsyncIterator[tuple[str, bytes]]:
        """Subject and bytes of every anchor, up to the present last."""
        async for msg in kept(self._connection, ANCHOR_STREAM, ANCHOR_TEMPLATE.wildcard):
            yield msg.subject, msg.data

    async def anchor(self) -> int:
        """Anchor all entries of all logs up to the present last; how many anchors that took.

        Nothing is written when no log has grown. Another checkpointer may do the same at the
        same time: what it has anchored is not anchored again.

        Raises:
            BrokerUnavailable: the broker stayed away.
            StorageFull: it has no room.
        """
        newest = await last(self._js, LOG_STREAM, LOG_TEMPLATE.wildcard)
        through = 0 if newest is None else newest.seq or 0
        written = 0
        end = await self._end()
        while end.through < through:
            if (appended := await self._append(await self._next(end, through), end)) is not None:
                written += 1
            end = appended or await self._end()
        return written

    async def note(self, pruned: Sequence[PrunedLog]) -> None:
        """Append an anchor which says that these logs, all of them anchored, are taken away.

        Raises:
            BrokerUnavailable, StorageFull: as ``anchor``; whether it is there is unknown.
        """
        is_noted = False
        while not is_noted:
            end = await self._end()
            anchor = Anchor(
                number=end.number + 1,
                time_ns=time.time_ns(),
                after=end.through,
                through=end.through,
                heads=() if end.last is None else (end.last,),  # again: the next one looks for it
                prev_blake3=end.tip.blake3,
                pruned=tuple(pruned),
            )
            is_noted = await self._append(anchor, end) is not None

    async def _end(self) -> _End:
        """Where to go on; from the log's beginning if that is not the log that was anchored."""
        found = await last(self._js, ANCHOR_STREAM, ANCHOR_TEMPLATE.wildcard)
        if found is None:
            return _End()
        data = found.data or b""
        anchor: Anchor = _ANCHORS.decode(data)
        through, head = anchor.through, _last(anchor)
        if head is None or not await self._is_there(head):
            log.error("the log is not the one that was anchored", anchor=anchor.number)
            through, head = 0, None
        return _End(anchor.number, through, Tip(found.seq or 0, blake3(data).hexdigest()), head)

    async def _is_there(self, head: Head) -> bool:
        """Whether an entry is still where it was, or was taken away with its whole log."""
        entry = await at(self._js, LOG_STREAM, head.stream_seq)
        if entry is None:
            return await self._pruned.get(ids.token(head.model_id)) is not None
        return blake3(entry).hexdigest() == head.blake3

    async def _next(self, end: _End, newest: int) -> Anchor:
        grown: dict[str, tuple[int, str]] = {}  # by model: its last entry's sequence and place
        through = end.through
        entries = stretch(
            self._connection,
            LOG_STREAM,
            LOG_TEMPLATE.wildcard,
            first=end.through + 1,
            last=newest,
            headers_only=True,
        )
        async for msg in entries:
            model, kind, number = msg.subject.split(".")[-3:]
            if model not in grown and len(grown) == MAX_HEADS:
                break
            through = msg.metadata.sequence.stream
            grown[model] = (through, f"{kind}.{number}")
        # In the stream's order: the broker unpacks a block of it to read one entry.
        heads = [
            await self._head(model, *grown[model]) for model in sorted(grown, key=grown.__getitem__)
        ]
        return Anchor(
            number=end.number + 1,
            time_ns=time.time_ns(),
            after=end.through,
            through=through,
            heads=tuple(sorted(heads, key=lambda head: head.model_id)),
            prev_blake3=end.tip.blake3,
        )

    async def _head(self, model: str, stream_seq: int, place: str) -> Head:
        data = await at(self._js, LOG_STREAM, stream_seq)
        return Head(
            model_id=ids.of_token(model),
            place=place,
            stream_seq=stream_seq,
            blake3=blake3(data or b"").hexdigest(),
        )

    async def _append(self, anchor: Anchor, end: _End) -> _End | None:
        """The new end; None when the chain has gone on meanwhile."""
        subjects = Subjects(ANCHOR_STREAM, ANCHOR_TEMPLATE.wildcard)
        chain = Chain(self._connection, subjects, end.tip, name="anchors")
        subject = ANCHOR_TEMPLATE.subject(number=str(anchor.number))
        try:
            tip = await chain.append(subject, lambda _: encode(anchor))
        except Fenced:
            return None
        return _End(anchor.number, anchor.through, tip, _last(anchor))


def _last(anchor: Anchor) -> Head | None:
    """The last entry that ``anchor`` covers."""
    return next((head for head in anchor.heads if head.stream_seq == anchor.through), None)

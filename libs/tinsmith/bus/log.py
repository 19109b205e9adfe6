"""The command log: one append-only, hash-chained sequence of entries per model.

Appending is the commit point: an op has happened exactly when its record is in the log. How
appends are ordered, and why an earlier owner's fail, is told by ``chain``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, assert_never

import msgspec
import structlog
from blake3 import blake3

from tinsmith import ids
from tinsmith.bus.chain import Chain, Subjects, Tip
from tinsmith.bus.claims import INLINE_BYTES
from tinsmith.bus.facts import headers_of, op_costs
from tinsmith.bus.history import count, kept, subjects
from tinsmith.bus.wire import last
from tinsmith.messages.base import GENESIS, BlobRef, decoder, encode
from tinsmith.messages.ops import LogEntry, Op, OpResult, Owned, Record, StateSaved
from tinsmith.messages.table import LOG_STREAM, LOG_TEMPLATE
from tinsmith.sealing.seal import PLAIN, aside, suited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from tinsmith.blobs import BlobStore
    from tinsmith.sealing import Seal

log = structlog.get_logger(__name__)

_ENTRIES = decoder(LogEntry)
_RESULTS = decoder(OpResult)
_OPS = decoder(Op)

KINDS = ("own", "op", "state")
FOLLOW_POLL_S = 1.0
COMMIT_PATIENCE_S = 600.0  # a finished step is worth waiting for the broker


@dataclass(frozen=True)
class Encoded:
    """An op's bytes, and what is stored of them, so that it is stored once."""

    data: bytes
    ref: BlobRef | None = None  # where they lie sealed, if they are large
    stored: bytes | None = None  # as they are sealed, if that is known


@dataclass(frozen=True)
class Head:
    """Where a model's log ends."""

    stream_seq: int  # 0: no entry yet
    blake3: str  # of the last entry's bytes
    epoch: int


class Committed(NamedTuple):
    """An op that has happened."""

    record: Record
    blake3: str  # of the record's bytes: the model's head right after the op
    at_s: float = 0.0  # unix time, by the broker's clock
    stream_seq: int = 0


class CommitLog:
    """Reads any model's log and opens one for writing."""

    def __init__(self, connection: tuple[Client, JetStreamContext], blobs: BlobStore) -> None:
        self._connection = connection
        self._client, self._js = connection
        self._blobs = blobs

    async def get(self, model_id: str, seq: int) -> Record | None:
        """The record of op ``seq``, or None while it has not happened."""
        found = await self.committed(model_id, seq)
        return None if found is None else found.record

    async def committed(self, model_id: str, seq: int) -> Committed | None:
        """As ``get``, with the digest of the record as it is stored."""
        found = await last(self._js, LOG_STREAM, _subject(model_id, "op", seq))
        if found is None:
            return None
        data = found.data or b""
        at_s = 0.0 if found.time is None else found.time.timestamp()
        return Committed(_ENTRIES.decode(data), blake3(data).hexdigest(), at_s, found.seq or 0)

    async def result(self, record: Record, seal: Seal = PLAIN) -> OpResult:
        """What the op of ``record`` answered; ``seal`` is its run's.

        Raises:
            BlobMissing: it is not in the blob store.
            Forgotten, SealBroken: as ``seal`` does.
        """
        stored = await self._bytes(record.result, record.result_ref)
        result: OpResult = _RESULTS.decode(await aside(suited(seal, record.sealed).open, stored))
        return result

    async def op(self, record: Record, seal: Seal = PLAIN) -> Op:
        """The op of ``record``; otherwise as ``result``."""
        stored = await self._bytes(record.op, record.op_ref)
        op: Op = _OPS.decode(await aside(suited(seal, record.sealed).open, stored))
        return op

    async def head(self, model_id: str) -> Head:
        """The end of the model's log as the broker has it."""
        found = await last(self._js, LOG_STREAM, _subject(model_id))
        if found is None:
            return Head(0, GENESIS, 0)
        data = found.data or b""
        return Head(found.seq or 0, blake3(data).hexdigest(), _ENTRIES.decode(data).epoch)

    async def owner(self, model_id: str) -> Owned | None:
        """The model's newest owner, whether it lives or not."""
        found = await last(self._js, LOG_STREAM, _subject(model_id, "own"))
        return None if found is None else _ENTRIES.decode(found.data or b"")

    async def newest_state(self, model_id: str) -> StateSaved | None:
        """The newest saved state of the model, from which a new owner starts."""
        found = await last(self._js, LOG_STREAM, _subject(model_id, "state"))
        return None if found is None else _ENTRIES.decode(found.data or b"")

    async def entries(
        self, model_id: str, *, from_op: int | None = None
    ) -> AsyncIterator[LogEntry]:
        """Every entry of the model in order up to the present last.

        With ``from_op`` the first one is the record of that op; there are none without it.
        """
        start = 1
        if from_op is not None:
            found = await last(self._js, LOG_STREAM, _subject(model_id, "op", from_op))
            if found is None:
                return
            start = found.seq or 0
        async for _, data in self.stored(model_id, start=start):
            yield _ENTRIES.decode(data)

    async def stored(self, model_id: str, *, start: int = 1) -> AsyncIterator[tuple[str, bytes]]:
        """Subject and bytes of every entry from stream sequence ``start`` to the present last."""
        async for msg in kept(self._connection, LOG_STREAM, _subject(model_id), first=start):
            yield msg.subject, msg.data

    async def follow(self, model_id: str) -> AsyncIterator[tuple[str, bytes]]:
        """As ``stored``, and then every entry that is appended, until the caller stops.

        Raises:
            BrokerUnavailable: the broker was silent for too long.
        """
        first = 1
        while True:
            before = first
            async for msg in kept(self._connection, LOG_STREAM, _subject(model_id), first=first):
                yield msg.subject, msg.data
                first = msg.metadata.sequence.stream + 1
            if first == before:
                await asyncio.sleep(FOLLOW_POLL_S)

    async def newest(self, model_id: str) -> list[tuple[str, bytes]]:
        """Subject and bytes of the newest entry of each kind, oldest first."""
        found = [await last(self._js, LOG_STREAM, _subject(model_id, kind)) for kind in KINDS]
        there = sorted((msg for msg in found if msg is not None), key=lambda msg: msg.seq or 0)
        return [(msg.subject or "", msg.data or b"") for msg in there]

    async def models(self) -> list[str]:
        """The ids of all models that have a log, sorted. NotFound when there is no such stream."""
        first = LOG_TEMPLATE.subject(model="*", kind="own", number="1")
        found = await subjects(self._client, LOG_STREAM, first)
        return sorted(subject.split(".")[-3].replace("-", ":") for subject in found)

    async def length(self, model_id: str) -> int:
        """How many entries the model's log has now."""
        return await count(self._js, LOG_STREAM, _subject(model_id))

    async def take(
        self,
        model_id: str,
        trainer_id: str,
        environment: dict[str, str] | None = None,
        *,
        seal: Seal = PLAIN,
    ) -> LogWriter:
        """Become the model's owner: from now on every earlier owner's append fails.

        ``environment`` is what the owner computes with, ``seal`` the model's.

        Raises:
            Fenced: another trainer took it in the same moment.
        """
        writer = await self.writer(model_id, seal=seal)
        await writer.own(trainer_id, environment or {})
        return writer

    async def writer(self, model_id: str, *, seal: Seal = PLAIN) -> LogWriter:
        """A writer at the log's end that is nobody's owner: only for copies."""
        head = await self.head(model_id)
        return LogWriter(self._connection, self._blobs, model_id, head, seal)

    async def _bytes(self, inline: bytes | None, ref: BlobRef | None) -> bytes:
        if inline is not None:
            return inline
        if ref is None:
            msg = "a log record has neither bytes nor a reference"
            raise ValueError(msg)
        return await self._blobs.get(ref)


class LogWriter:
    """The one writer of a model's log, for as long as nobody else takes it."""

    def __init__(
        self,
        connection: tuple[Client, JetStreamContext],
        blobs: BlobStore,
        model_id: str,
        head: Head,
        seal: Seal = PLAIN,
    ) -> None:
        self.seal = seal
        """The model's."""
        self.epoch = head.epoch
        """The owner's epoch; rises with every take-over."""
        self._blobs = blobs
        self._model_id = model_id
        self._chain = Chain(
            connection,
            Subjects(LOG_STREAM, _subject(model_id)),
            Tip(head.stream_seq, head.blake3),
            name=model_id,
            patience_s=COMMIT_PATIENCE_S,
        )

    async def own(self, trainer_id: str, environment: dict[str, str]) -> None:
        """Append the entry that fences every earlier owner."""
        entry = Owned(
            model_id=self._model_id,
            epoch=self.epoch + 1,
            trainer_id=trainer_id,
            environment=environment,
            prev_blake3="",
        )
        await self._append(entry)

    async def commit(
        self, seq: int, op: Encoded, result: OpResult, *, state_blake3: str = ""
    ) -> None:
        """Make op ``seq`` happen; ``state_blake3`` is the model's after it, if it changed.

        Raises:
            Fenced: another owner has written; the caller's state of the model is void.
            BrokerUnavailable: the broker stayed away; whether it happened is unknown.
            Forgotten: the run was forgotten; nothing can be added to it any more.
        """
        seal, encoded = self.seal, encode(result)
        stored = await aside(seal.seal, encoded)
        large = len(stored) > INLINE_BYTES
        record = Record(
            model_id=self._model_id,
            seq=seq,
            epoch=self.epoch,
            op=None if op.ref else op.stored or await aside(seal.seal, op.data),
            op_ref=op.ref,
            op_blake3=await aside(seal.digest, op.data),
            result=None if large else stored,
            result_ref=await self._blobs.put(stored) if large else None,
            result_blake3=await aside(seal.digest, encoded),
            state_blake3=state_blake3,
            sealed=seal.scheme,
            prev_blake3="",
        )
        refs = tuple(ref.blake3 for ref in (record.op_ref, record.result_ref) if ref is not None)
        costs = msgspec.structs.replace(op_costs(result), blobs=refs)
        await self._append(record, headers_of(costs))

    async def save_state(self, seq: int, parts: dict[str, BlobRef], *, state_blake3: str) -> None:
        """Note that the model after op ``seq`` lies in ``parts``; raises as ``commit``."""
        entry = StateSaved(
            model_id=self._model_id,
            seq=seq,
            epoch=self.epoch,
            state_blake3=state_blake3,
            parts=parts,
            prev_blake3="",
        )
        await self._append(entry)

    async def copy(self, data: bytes) -> None:
        """Append an entry of the model that was written elsewhere, byte for byte.

        Raises:
            ValueError: it does not follow the last entry.
            Fenced, BrokerUnavailable: as ``commit``.
        """
        entry: LogEntry = _ENTRIES.decode(data)

        def checked(prev_blake3: str) -> bytes:
            if (entry.model_id, entry.prev_blake3) != (self._model_id, prev_blake3):
                msg = f"{self._model_id}: the entry does not follow {prev_blake3}"
                raise ValueError(msg)
            return data

        await self._chain.append(subject_of(entry), checked)
        self.epoch = entry.epoch

    async def _append(self, entry: LogEntry, told: dict[str, str] | None = None) -> None:
        """Append ``entry``, chained to the one before it, with ``told`` in its headers."""

        def chained(prev_blake3: str) -> bytes:
            return encode(msgspec.structs.replace(entry, prev_blake3=prev_blake3))

        await self._chain.append(subject_of(entry), chained, headers=told)
        self.epoch = entry.epoch


def subject_of(entry: LogEntry) -> str:
    """Where ``entry`` is kept."""
    match entry:
        case Record():
            return _subject(entry.model_id, "op", entry.seq)
        case Owned():
            return _subject(entry.model_id, "own", entry.epoch)
        case StateSaved():
            return _subject(entry.model_id, "state", entry.seq)
        case _:
            assert_never(entry)


def _subject(model_id: str, kind: str = "*", number: int | None = None) -> str:
    return LOG_TEMPLATE.subject(
        model=ids.token(model_id), kind=kind, number="*" if number is None else str(number)
    )

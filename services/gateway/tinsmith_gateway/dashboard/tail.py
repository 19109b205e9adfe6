"""The end of a run's log: its last entries in words, and whether they link up."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith.errors import BlobMissing, Forgotten
from tinsmith.logbook.entry import Entry
from tinsmith.messages import ops
from tinsmith.messages.base import Failed

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.sealing import Seal

OPS = 30
"""The last operations that are shown, with all entries between them."""
MAX_RESULT_BYTES = 1 << 20
KEPT = 64
"""Tails that are remembered: a log that has not grown is not read again."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a log."""

    kind: str
    seq: int = -1  # of a take-over, which is none of an operation
    epoch: int
    blake3: str
    state_blake3: str = ""
    details: dict[str, Any] = {}


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """The last entries, oldest first."""

    head: str = ""  # digest of the last entry
    epoch: int = 0
    last_op: int | None = None
    state_blake3: str = ""  # of the model, as the newest entry that tells it has it
    is_linked: bool = True
    """Each of ``lines`` names the digest of the one before it. More is for ``log verify``."""
    lines: list[Line] = []


class TailReader:
    """Reads and remembers them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: OrderedDict[str, tuple[str, Tail]] = OrderedDict()

    async def read(self, model_id: str, seal: Seal) -> Tail:
        """The end of the model's log as it is now; contents that are closed are told as such.

        Raises:
            BrokerUnavailable: the broker is away.
        """
        head = await self._bus.log.head(model_id)
        state = f"{head.blake3} {seal.why_closed}"
        known = self._known.get(model_id)
        if known is not None and known[0] == state:
            return known[1]
        tail = await self._read(model_id, seal)
        self._known[model_id] = state, tail
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return tail

    async def _read(self, model_id: str, seal: Seal) -> Tail:
        last = await self._bus.books.last_op(model_id)
        first = None
        if last is not None and last.seq >= OPS:
            first = await self._bus.log.committed(model_id, last.seq - OPS + 1)
        start = 1 if first is None else first.stream_seq
        lines: list[Line] = []
        is_linked, before = True, ""
        async for subject, data in self._bus.log.stored(model_id, start=start):
            entry = Entry.read(data, subject)
            is_linked = is_linked and before in ("", entry.entry.prev_blake3)
            before = entry.blake3
            lines.append(await self._line(entry, seal))
        # A saved state may stand behind operations that came after it.
        states = {line.seq: line.state_blake3 for line in lines if line.state_blake3}
        return Tail(
            head=before,
            epoch=lines[-1].epoch if lines else 0,
            last_op=None if last is None else last.seq,
            state_blake3=states[max(states)] if states else "",
            is_linked=is_linked,
            lines=lines[-2 * OPS :],
        )

    async def _line(self, entry: Entry, seal: Seal) -> Line:
        found = entry.entry
        if isinstance(found, ops.Owned):
            details = {"trainer": found.trainer_id}
            return Line(kind="owned", epoch=found.epoch, blake3=entry.blake3, details=details)
        state = found.state_blake3
        kind, details = "state_saved", {}
        if isinstance(found, ops.Record):
            kind, details = await self._told(found, seal)
        return Line(
            kind=kind,
            seq=found.seq,
            epoch=found.epoch,
            blake3=entry.blake3,
            state_blake3=state,
            details=details,
        )

    async def _told(self, record: ops.Record, seal: Seal) -> tuple[str, dict[str, Any]]:
        if record.sealed and seal.why_closed is not None:
            is_gone = isinstance(seal.why_closed, Forgotten)
            return "sealed", {"contents": "forgotten" if is_gone else "their key is not here"}
        if record.result_ref is not None and record.result_ref.size > MAX_RESULT_BYTES:
            return "operation", {"result": f"{record.result_ref.size} bytes"}
        try:
            return told(await self._bus.log.result(record, seal))
        except BlobMissing:
            return "operation", {"result": "lost"}


def told(result: ops.OpResult) -> tuple[str, dict[str, Any]]:
    """What an operation was, by its result, and what came of it."""
    kind = type(result).__name__.removesuffix("Done")
    match result:
        case Failed():
            return kind, {"message": result.message, "category": result.category}
        case ops.ForwardBackwardDone() | ops.OptimStepDone():
            return kind, {"metrics": dict(result.metrics)}
        case (
            ops.SaveWeightsDone() | ops.SaveWeightsForSamplerDone() | ops.SaveWeightsExternalDone()
        ):
            return kind, {"path": result.path, "size_bytes": result.size_bytes}
        case _:
            return kind, {}

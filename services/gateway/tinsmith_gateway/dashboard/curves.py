"""The curves of a run: what its operations measured, at no more points than a chart can show.

Records hold the data that was trained on, so that reading all of a long log is out of the question.
A few are read out of each stretch of it, and of those the results alone are opened.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from tinsmith.errors import BlobMissing
from tinsmith.messages import ops

if TYPE_CHECKING:
    from tinsmith.bus import Bus, Committed
    from tinsmith.sealing import Seal

MAX_POINTS = 500
READS = 150
"""Records that one request reads; the page comes again for the rest."""
READ_S = 2.0
MAX_RESULT_BYTES = 8 << 20
"""A larger result is left out."""
TRIES = 3
"""Records of a stretch that are looked at, until one of them computed something."""
KEPT = 20_000
"""Points that are remembered, of all runs: what has happened does not change."""
_SPREAD = 7919  # a prime: stretches are not all read at the same place of a loop's rhythm


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What one operation measured."""

    seq: int
    at_s: float
    tokens: int = 0
    metrics: dict[str, float | None] = {}


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Points in order, behind the ``after`` that was asked for."""

    points: list[Point]
    next: int  # to be asked for as ``after``
    has_more: bool  # already


class CurveReader:
    """Reads and remembers them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: OrderedDict[tuple[str, int], Point | None] = OrderedDict()

    async def read(self, model_id: str, seal: Seal, *, after: int, points: int) -> Curves:
        """Up to ``points`` of them behind op ``after`` (-1: from the first one).

        Raises:
            Forgotten, SealBroken: the run's results cannot be opened any more, or not here.
            BrokerUnavailable: the broker is away.
        """
        if seal.why_closed is not None:
            raise seal.why_closed
        last = await self._bus.books.last_op(model_id)
        end = -1 if last is None else last.seq
        width = max(1, -(-(end - after) // points))
        found: list[Point] = []
        reads, until = READS, time.monotonic() + READ_S
        at = after + 1
        while at <= end and reads > 0 and time.monotonic() < until:
            stop = min(at + width, end + 1)
            for seq in _places(at, stop):
                is_new = (model_id, seq) not in self._known
                point = await self._point(model_id, seq, seal)
                reads -= is_new
                if point is not None:
                    found.append(point)
                    break
            at = stop
        return Curves(points=found, next=at - 1, has_more=at <= end)

    async def _point(self, model_id: str, seq: int, seal: Seal) -> Point | None:
        """What op ``seq`` measured; None when it computed nothing."""
        if (model_id, seq) in self._known:
            self._known.move_to_end((model_id, seq))
            return self._known[model_id, seq]
        committed = await self._bus.log.committed(model_id, seq)
        if committed is None:
            return None
        point = await self._measured(committed, seal)
        self._known[model_id, seq] = point
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return point

    async def _measured(self, committed: Committed, seal: Seal) -> Point | None:
        record = committed.record
        if record.result_ref is not None and record.result_ref.size > MAX_RESULT_BYTES:
            return None
        try:
            result = await self._bus.log.result(record, seal)
        except BlobMissing:
            return None
        match result:
            case ops.ForwardBackwardDone():
                tokens = sum(tensor.shape[0] if tensor.shape else 0 for tensor in result.logprobs)
                return _of(committed, result.metrics, tokens)
            case ops.OptimStepDone() if result.metrics:
                return _of(committed, result.metrics, 0)
            case _:
                return None


def _places(first: int, stop: int) -> list[int]:
    """The ops of a stretch that are tried in turn: from somewhere in it, in order."""
    count = stop - first
    begin = first * _SPREAD % count
    return sorted(first + (begin + step) % count for step in range(min(TRIES, count)))


def _of(committed: Committed, metrics: dict[str, float], tokens: int) -> Point:
    return Point(
        seq=committed.record.seq, at_s=committed.at_s, tokens=tokens, metrics=dict(metrics)
    )

"""The replay of one model's log: op after op on a workbench, up to the first difference."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinsmith.errors import InvalidRequest, UserError
from tinsmith.logbook import DigestMismatch, op_of, result_of
from tinsmith.logbook.differences import NO_GAP, Comparison, Difference, Gap
from tinsmith.messages import ops
from tinsmith.messages.base import GENESIS, Failed
from tinsmith_trainer import repeating
from tinsmith_trainer.repeating import between_states

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tinsmith.logbook import Entry, Logbook
    from tinsmith_trainer.segments import Plan, Segment
    from tinsmith_trainer.workbench import Workbench


@dataclass(frozen=True)
class Divergence:
    """Where the log and its replay part."""

    seq: int
    op: str  # the op's kind, or that of the entry
    difference: Difference


@dataclass
class Findings:
    """What a replay has found so far."""

    divergence: Divergence | None = None
    results: int = 0
    """Results that were compared."""
    states: int = 0
    """States that were compared."""
    led_up: int = 0
    """Ops that were only repeated to reach the first that is compared."""
    not_repeated: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    largest: Gap = NO_GAP
    """The largest gap between two numbers that a tolerance allowed."""
    largest_seq: int = 0
    last_seq: int = -1
    """The last op that was looked at."""
    seconds: float = 0.0


class Replay:
    """One pass through the log of one model."""

    def __init__(
        self,
        model_id: str,
        logbook: Logbook,
        bench: Workbench,
        plan: Plan,
        *,
        tolerance: float | None = None,
        is_alone: bool = False,
        on_op: Callable[[], None] = lambda: None,
    ) -> None:
        """With a ``tolerance`` numbers may differ by it, and computed states are not compared.

        ``is_alone`` leaves out the rows of others that were in the run's passes.
        """
        self.findings = Findings()
        self._model_id = model_id
        self._logbook = logbook
        self._bench = bench
        self._plan = plan
        self._tolerance = tolerance
        self._is_alone = is_alone
        self._on_op = on_op
        self._segment: Segment | None = None  # where the model is
        self._next_seq = 0
        self._states: dict[int, str] = {}  # digests by seq, of those that were found here

    async def run(self, entries: AsyncIterator[Entry]) -> Findings:
        """Repeat and compare what the plan says, up to the first divergence.

        Raises:
            BlobMissing: the logbook lacks what a load or a saved state refers to.
            LogDamaged: an op or a result cannot be read.
        """
        began, previous = time.monotonic(), GENESIS
        try:
            async for item in entries:
                if self._is_beyond(item.entry):
                    break
                divergence = self._check_link(item, previous) or await self._follow(item.entry)
                if divergence is not None:
                    self.findings.divergence = divergence
                    break
                previous = item.blake3
        finally:
            self.findings.seconds = time.monotonic() - began
        return self.findings

    def _is_beyond(self, entry: ops.LogEntry) -> bool:
        return isinstance(entry, ops.Record) and entry.seq > self._plan.last

    def _check_link(self, item: Entry, previous: str) -> Divergence | None:
        entry = item.entry
        if entry.prev_blake3 == previous:
            return None
        seq = self._next_seq if isinstance(entry, ops.Owned) else entry.seq
        difference = Difference("prev_blake3", entry.prev_blake3, previous)
        return _divergence(seq, entry, difference)

    async def _follow(self, entry: ops.LogEntry) -> Divergence | None:
        match entry:
            case ops.Owned(environment=environment):
                await self._bench.set_up(environment)
                return None
            case ops.StateSaved(seq=seq, state_blake3=saved):
                difference = between_states(saved, self._states.get(seq, saved))
                return _divergence(seq, entry, difference)
            case ops.Record(seq=seq) if seq < self._next_seq:
                return await self._late(entry)
            case ops.Record(seq=seq):
                self._next_seq = seq + 1
                return await self._record(entry)

    async def _late(self, record: ops.Record) -> Divergence | None:
        """An op that came after its session had ended: it can only have failed."""
        if isinstance(await result_of(self._logbook, record), Failed):
            self.findings.not_repeated[repeating.OTHER_FAILURES] += 1
            return None
        difference = Difference("seq", str(record.seq), f"{self._next_seq} or more")
        return _divergence(record.seq, record, difference)

    async def _record(self, record: ops.Record) -> Divergence | None:
        segment = self._plan.segment_of(record.seq)
        if segment is None:
            return None
        self.findings.last_seq = record.seq
        if segment is not self._segment and (divergence := await self._enter(segment)):
            return divergence
        try:
            op, result = await op_of(self._logbook, record), await result_of(self._logbook, record)
        except DigestMismatch as exc:
            mismatch = Difference(exc.field, getattr(record, exc.field), exc.problem)
            return _divergence(record.seq, record, mismatch)
        is_compared = record.seq >= segment.compare_from
        difference = await self._repeat(record, op, result, is_compared=is_compared)
        self._on_op()
        return _divergence(record.seq, op.body, difference)

    async def _enter(self, segment: Segment) -> Divergence | None:
        """Bring the model to where ``segment`` starts."""
        self._segment = segment
        if (start := segment.start) is None:
            return None
        try:
            await self._bench.restore(self._model_id, start.parts, with_optimizer=True)
        except UserError as exc:
            return _divergence(start.seq, start, Difference("parts", "a state", str(exc)))
        difference = await self._compare_state(start.seq, start.state_blake3)
        return _divergence(start.seq, start, difference)

    async def _repeat(
        self, record: ops.Record, op: ops.Op, result: ops.OpResult, *, is_compared: bool
    ) -> Difference | None:
        if (op.model_id, op.seq) != (self._model_id, record.seq):
            mine = f"{self._model_id}:{record.seq}"
            return Difference("op", mine, f"{op.model_id}:{op.seq}")
        kind = repeating.why_not_repeated(op.body, result)
        if kind is None and repeating.saves(op.body) and not self._compares_saves(is_compared):
            kind = repeating.SAVES
        if kind is not None:
            self.findings.not_repeated[kind] += 1
            return None
        found = await self._found(op, result)
        self.findings.tokens += _tokens(op.body)
        if not is_compared:
            self.findings.led_up += 1
            return Comparison(tolerance=math.inf).first(result, found)  # did it end as it had?
        difference = self._compare(record.seq, result, found)
        has_new_state = repeating.changes_state(op.body) and not isinstance(found, Failed)
        if difference is None and has_new_state and self._tolerance is None:
            difference = await self._compare_state(record.seq, record.state_blake3)
        return difference

    async def _found(self, op: ops.Op, result: ops.OpResult) -> ops.OpResult:
        if not self._is_alone:
            return await repeating.repeat(self._bench, op, result)
        if self._tolerance is None and repeating.has_company(result):
            raise InvalidRequest(
                f"--alone: op {op.seq} was computed in a pass with other models' rows, and its "
                "last bits depend on how many; drop it, or add --tolerance, of which 1e-4 is plenty"
            )
        return await repeating.repeat_alone(self._bench, op, result)

    def _compares_saves(self, is_compared: bool) -> bool:  # noqa: FBT001 - of the caller
        """They lead up to nothing, and parts have digests, which a tolerance cannot compare."""
        return is_compared and self._tolerance is None

    def _compare(self, seq: int, expected: ops.OpResult, found: ops.OpResult) -> Difference | None:
        comparison = Comparison(tolerance=self._tolerance)
        difference = comparison.first(expected, found)
        self.findings.results += 1
        if comparison.largest.amount > self.findings.largest.amount:
            self.findings.largest, self.findings.largest_seq = comparison.largest, seq
        return difference

    async def _compare_state(self, seq: int, expected: str) -> Difference | None:
        found = self._states[seq] = await self._bench.state_blake3(self._model_id)
        self.findings.states += 1
        return between_states(expected, found)


def _divergence(
    seq: int, where: ops.LogEntry | ops.OpBody, difference: Difference | None
) -> Divergence | None:
    """``difference`` at ``where``, called as it is on the bus."""
    if difference is None:
        return None
    return Divergence(seq, str(type(where).__struct_config__.tag), difference)


def _tokens(body: ops.OpBody) -> int:
    if not isinstance(body, ops.ForwardBackward):
        return 0
    return sum(datum.tokens.shape[0] if datum.tokens.shape else 0 for datum in body.data)

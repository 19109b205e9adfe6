"""What must hold from one entry of a log to the next, and between an op and its result. Pure."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from tinsmith.logbook.entry import LogDamaged, place_of
from tinsmith.messages import ops
from tinsmith.messages.base import GENESIS, Failed

if TYPE_CHECKING:
    from tinsmith.logbook.entry import Entry

_DONE: dict[type, type] = {
    ops.CreateModel: ops.CreateModelDone,
    ops.ForwardBackward: ops.ForwardBackwardDone,
    ops.OptimStep: ops.OptimStepDone,
    ops.SaveWeights: ops.SaveWeightsDone,
    ops.SaveWeightsForSampler: ops.SaveWeightsForSamplerDone,
    ops.SaveWeightsExternal: ops.SaveWeightsExternalDone,
    ops.LoadWeights: ops.LoadWeightsDone,
    ops.Refused: Failed,
}
_CHANGES = (ops.CreateModelDone, ops.OptimStepDone, ops.LoadWeightsDone)


class Rules:
    """Follows one log. Every method raises LogDamaged, naming the entry and the field."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self.number = 0
        """Entries so far."""
        self.ops = 0
        """Records among them."""
        self.epoch = 0
        self.head = GENESIS
        self.state = ""
        """Digest of the model after the last op that changed it."""
        self._states: dict[int, str] = {}  # digest by seq, of the ops that have one
        self._seqs = Seqs()

    @property
    def missing(self) -> int:
        """Seqs that never came, as those after them were told."""
        return self._seqs.missing

    def follow(self, entry: Entry) -> str:
        """The entry comes next: its link, owner and epoch; returns its place in words."""
        self.number += 1
        found = entry.entry
        place = place_of(found, self.number)
        if found.model_id != self._model_id:
            raise LogDamaged(place, "model_id", f"{found.model_id!r} is not {self._model_id!r}")
        if found.prev_blake3 != self.head:
            before = f"entry {self.number - 1}" if self.number > 1 else "a log's beginning"
            problem = (
                f"{found.prev_blake3} is not the digest of {before}, {self.head}; entries were "
                "changed, removed, swapped or inserted"
            )
            raise LogDamaged(place, "prev_blake3", problem)
        self._check_epoch(found, place)
        if isinstance(found, ops.StateSaved):
            self._check_state(found, place)
        self.head, self.epoch = entry.blake3, found.epoch
        return place

    def carry_out(self, record: ops.Record, op: ops.Op, result: ops.OpResult, place: str) -> None:
        """The entry that came last is of an op, with this result."""
        if (op.model_id, op.seq) != (record.model_id, record.seq):
            problem = f"it is op {op.seq} of {op.model_id!r}, not op {record.seq}"
            raise LogDamaged(place, "op", problem)
        if not isinstance(result, (_DONE[type(op.body)], Failed)):
            problem = f"{type(result).__name__} is no answer to {type(op.body).__name__}"
            raise LogDamaged(place, "result", problem)
        if isinstance(result, _CHANGES) != bool(record.state_blake3):
            is_there = "there" if record.state_blake3 else "absent"
            problem = f"it is {is_there}, after an op that answered {type(result).__name__}"
            raise LogDamaged(place, "state_blake3", problem)
        self._seqs.add(record.seq, is_failed=isinstance(result, Failed), place=place)
        self.ops += 1
        self._states[record.seq] = record.state_blake3
        self.state = record.state_blake3 or self.state

    def pass_over(self, record: ops.Record, place: str) -> None:
        """The entry that came last is of an op that is sealed, as is whether it failed."""
        self._seqs.add(record.seq, is_failed=True, place=place)
        self.ops += 1
        self._states[record.seq] = record.state_blake3
        self.state = record.state_blake3 or self.state

    def _check_epoch(self, found: ops.LogEntry, place: str) -> None:
        is_owner = isinstance(found, ops.Owned)
        expected = self.epoch + is_owner
        if found.epoch != expected or found.epoch < 1:
            problem = f"{found.epoch} comes after {self.epoch}; it must be {max(expected, 1)}"
            if not self.epoch and not is_owner:
                problem = "a log begins with the entry of its first owner"
            raise LogDamaged(place, "epoch", problem)

    def _check_state(self, saved: ops.StateSaved, place: str) -> None:
        if saved.seq not in self._states:
            raise LogDamaged(place, "seq", f"op {saved.seq} has not happened before it")
        expected = self._states[saved.seq]
        if saved.state_blake3 != expected:
            problem = f"{saved.state_blake3!r} is not {expected!r}, the one of op {saved.seq}"
            raise LogDamaged(place, "state_blake3", problem)


class Seqs:
    """The seqs of a log's ops: 0, 1, 2, ... without gaps or doubles.

    But for one case: when a session ended before one of its requests had arrived, the requests
    that waited for it were answered as failed, and so was the missing one if it came late.
    """

    def __init__(self) -> None:
        self._next = 0
        self._gaps: list[tuple[int, int]] = []  # first seq, and the one after the last
        self._late: set[int] = set()

    @property
    def missing(self) -> int:
        """How many never came."""
        return sum(end - first for first, end in self._gaps) - len(self._late)

    def add(self, seq: int, *, is_failed: bool, place: str) -> None:
        """``seq`` comes next; LogDamaged when it cannot."""
        if seq == self._next:
            self._next += 1
        elif is_failed and seq > self._next:
            self._gaps.append((self._next, seq))
            self._next = seq + 1
        elif is_failed and seq not in self._late and self._is_in_gap(seq):
            self._late.add(seq)
        else:
            problem = f"{seq} cannot come here; the next is {self._next}"
            raise LogDamaged(place, "seq", problem)

    def _is_in_gap(self, seq: int) -> bool:
        before = bisect.bisect_right(self._gaps, seq, key=lambda gap: gap[0])
        return before > 0 and seq < self._gaps[before - 1][1]

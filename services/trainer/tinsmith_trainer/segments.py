"""Which parts of a log are replayed: stretches between saved states. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.messages.ops import StateSaved


@dataclass(frozen=True)
class Segment:
    """Ops that are repeated one after another, from a state of their own."""

    start: StateSaved | None  # None: the model does not exist yet
    last: int  # seq of the last op
    compare_from: int = 0  # ops before it are repeated, but not compared

    @property
    def first(self) -> int:
        """Seq of the first op that is repeated."""
        return 0 if self.start is None else self.start.seq + 1

    def __contains__(self, seq: int) -> bool:
        return self.first <= seq <= self.last


@dataclass(frozen=True)
class Stretch:
    """What of a log is asked for, by seq, both ends included."""

    first: int = 0
    last: int | None = None  # None: to the end of the log

    def ends_at(self, newest: int) -> int:
        """The seq of its last op, in a log whose last op is ``newest``.

        Raises:
            InvalidRequest: the log has no op of it.
        """
        last = newest if self.last is None else min(self.last, newest)
        if self.last is not None and self.last < self.first:
            raise InvalidRequest(f"--to: {self.last} is before --from {self.first}; swap them")
        if last < self.first:
            raise InvalidRequest(
                f"--from: op {self.first} is not in the log, which ends at op {newest}; lower it"
            )
        return last


@dataclass(frozen=True)
class Sample:
    """A random share of the segments."""

    share: float  # over 0, at most 1
    seed: int


@dataclass(frozen=True)
class Plan:
    """The segments to replay, in order, and how many there are in all."""

    segments: tuple[Segment, ...]
    in_all: int
    sample: Sample | None = None  # by which they were chosen

    @property
    def last(self) -> int:
        """Seq of the last op."""
        return self.segments[-1].last

    @property
    def ops(self) -> int:
        """How many ops are repeated."""
        return sum(segment.last + 1 - segment.first for segment in self.segments)

    def segment_of(self, seq: int) -> Segment | None:
        """The segment that has op ``seq``, if one has."""
        return next((segment for segment in self.segments if seq in segment), None)


def plan(
    states: Sequence[StateSaved], newest: int, stretch: Stretch, sample: Sample | None = None
) -> Plan:
    """All of ``stretch`` in one piece, or a sample of its pieces between ``states``.

    ``newest`` is the seq of the log's last op.

    Raises:
        InvalidRequest: the log has nothing of it.
    """
    if sample is None:
        return Plan((whole(states, newest, stretch),), 1)
    found = pieces(states, newest, stretch)
    return Plan(chosen(found, sample), len(found), sample)


def whole(states: Sequence[StateSaved], newest: int, stretch: Stretch) -> Segment:
    """All of ``stretch`` in one piece, from the newest of ``states`` that is before it."""
    before = [state for state in states if state.seq < stretch.first]
    start = max(before, key=lambda state: state.seq, default=None)
    return Segment(start, stretch.ends_at(newest), stretch.first)


def pieces(states: Sequence[StateSaved], newest: int, stretch: Stretch) -> tuple[Segment, ...]:
    """All of ``stretch``, cut wherever a state was saved, in order."""
    rest = whole(states, newest, stretch)
    segments = []
    for state in sorted(states, key=lambda state: state.seq):
        if rest.first <= state.seq < rest.last:
            segments.append(Segment(rest.start, state.seq, stretch.first))
            rest = Segment(state, rest.last, stretch.first)
    return (*segments, rest)


def chosen(segments: Sequence[Segment], sample: Sample) -> tuple[Segment, ...]:
    """A share of ``segments``, at least one, in order; equal seeds choose equally."""
    count = max(1, round(sample.share * len(segments)))
    found = random.Random(sample.seed).sample(segments, count)
    return tuple(sorted(found, key=lambda segment: segment.first))

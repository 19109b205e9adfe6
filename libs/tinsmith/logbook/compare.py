"""Where two runs part: the first op at which they differ, and in what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.ids import session_of
from tinsmith.logbook.contents import op_of, result_of
from tinsmith.logbook.differences import Comparison
from tinsmith.messages import ops

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tinsmith.logbook.source import Logbook


class Side(NamedTuple):
    """One of the two runs."""

    logbook: Logbook
    model_id: str


class Step(NamedTuple):
    """An op of one side, as it went."""

    seq: int
    compared: dict[str, object]  # seq, op, result, state
    environment: dict[str, str]


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ."""

    seq: int
    field: str  # such as op.learning_rate or result.logprobs[0][3]
    a: str
    b: str
    environments: tuple[tuple[str, str, str], ...] = ()
    """What the op was computed with, as far as that differs."""


@dataclass(frozen=True)
class Outcome:
    """Of a comparison."""

    equal_ops: int
    difference: Difference | None


async def compare(a: Side, b: Side, *, on_op: Callable[[], None]) -> Outcome:
    """Compare two runs op by op up to the first difference.

    Their own ids, and those of their sessions, do not count.

    Raises:
        LogDamaged: an op or its result cannot be read.
    """
    comparison = Comparison(names=(_names(a.model_id), _names(b.model_id)))
    left, right = _steps(a), _steps(b)
    equal = 0
    while True:
        one, other = await anext(left, None), await anext(right, None)
        if one is None or other is None:
            return Outcome(equal, _end(one, other))
        for field, value in one.compared.items():
            for found in comparison.between(field, value, other.compared[field]):
                environments = tuple(_departures(one, other))
                place = (one.seq, found.field, found.expected, found.found)
                return Outcome(equal, Difference(*place, environments))
        equal += 1
        on_op()


def _end(one: Step | None, other: Step | None) -> Difference | None:
    """At least one side has no more ops."""
    longer = one or other
    if longer is None:
        return None
    a, b = ("its log has ended" if step is None else "it is there" for step in (one, other))
    return Difference(longer.seq, "op", a, b)


async def _steps(side: Side) -> AsyncIterator[Step]:
    environment: dict[str, str] = {}
    async for entry in side.logbook.entries(side.model_id):
        found = entry.entry
        if isinstance(found, ops.Owned):
            environment = found.environment
        elif isinstance(found, ops.Record):
            op, result = await op_of(side.logbook, found), await result_of(side.logbook, found)
            compared = {"seq": found.seq, "op": op.body, "result": result}
            yield Step(found.seq, {**compared, "state": found.state_blake3}, environment)


def _departures(one: Step, other: Step) -> Iterator[tuple[str, str, str]]:
    comparison = Comparison()
    for found in comparison.between("environment", one.environment, other.environment):
        yield found.field, found.expected, found.found


def _names(model_id: str) -> dict[str, str]:
    """What stands for the ids that differ in any two runs."""
    return {model_id: "<run>", session_of(model_id): "<session>"}

"""Deltas folded to ones that skip versions: so many to one, and so many of those again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinsmith.errors import InvalidRequest
from tinsmith.weights.change import Change, dense, fold
from tinsmith.weights.delta import Delta

if TYPE_CHECKING:
    from tinsmith.weights.state import WeightState

LEVELS = 2


class Skip(NamedTuple):
    """A delta over several versions."""

    base_version: int
    version: int
    delta: Delta


class Folding:
    """Collects the deltas of a lineage; holds at most ``LEVELS`` times ``count`` of them."""

    def __init__(self, count: int) -> None:
        """``count`` below 2 folds nothing."""
        self._count = count
        self._levels: list[list[Skip]] = [[] for _ in range(LEVELS)]

    def clear(self) -> None:
        """Nothing leads on from what was added before."""
        for level in self._levels:
            level.clear()

    def add(self, version: int, delta: Delta) -> None:
        """The delta to ``version`` from the one before."""
        if self._count > 1:
            self._levels[0].append(Skip(version - 1, version, delta))

    def due(self, state: WeightState) -> list[Skip]:
        """The skips that are complete; ``state`` is that of the last delta added."""
        found = []
        for number, level in enumerate(self._levels):
            if len(level) < self._count or self._count < 2:
                break
            delta = folded([skip.delta for skip in level], state)
            skip = Skip(level[0].base_version, level[-1].version, delta)
            level.clear()
            found.append(skip)
            if number + 1 < LEVELS:
                self._levels[number + 1].append(skip)
        return found


def folded(deltas: list[Delta], state: WeightState) -> Delta:
    """One delta that does what consecutive ``deltas`` do, which lead to ``state``."""
    changes: dict[str, Change] = {}
    for delta in deltas:
        for name, change in delta.changes.items():
            before = changes.get(name)
            changes[name] = change if before is None else _sum(before, change, name, state)
    changes = {name: change for name, change in changes.items() if change.kind != "same"}
    digests = {name: state.digests[name] for name in changes}
    return Delta(deltas[0].base_root, deltas[-1].root, changes, digests)


def _sum(first: Change, second: Change, name: str, state: WeightState) -> Change:
    if "dense" in (first.kind, second.kind):
        return dense(state[name])
    try:
        return fold(first, second)
    except InvalidRequest:  # forms without a sum; the end of all of them is known
        return dense(state[name])

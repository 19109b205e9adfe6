"""Decides whose turn it is: in the main, the model that has had the fewest tokens so far. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, "Start-Time Fair Queueing", 1996) in tokens: models
that always have work get equal shares, whatever the size of their ops and however many they have
queued. A model that has been idle starts where the others are: nothing is saved up. Ops of one
model keep their order.

Whoever has the turn keeps it until it is a quantum ahead. Small training steps are then finished
one after another: in strict turns all of them would end late, together, and their clients would
next be idle together. A model waits for a quantum and a pass of each model that is before it, at
most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

T = TypeVar("T")

QUANTUM = 1024
"""Tokens that the model whose turn it is may be ahead of the others."""
LEAST_COST = 16
"""Tokens that a turn costs at least: steps are cheap, but not free."""


@dataclass(frozen=True)
class Place:
    """Where a model stands in the queue."""

    turns: int
    """Turns of other models that come before its next one, as things are."""
    tokens: int
    """Tokens of those turns."""


class Scheduler(Generic[T]):
    """Queues of (cost, op) by model."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[int, T]]] = {}  # those of models with work
        self._had: dict[str, int] = {}  # tokens, from when the model was first busy
        self._now = 0
        """The least that a model with work had last: where one that comes back starts."""
        self._turn = ""
        """The model that ran last."""

    def add(self, model_id: str, op: T, *, cost: int) -> None:
        """Queue ``op`` behind the model's earlier ones; ``cost`` is its number of tokens."""
        queue = self._queues.get(model_id)
        if queue is None:
            queue = self._queues[model_id] = deque()
            self._had[model_id] = max(self._now, self._had.get(model_id, 0))
        queue.append((max(cost, LEAST_COST), op))

    def take(self) -> T | None:
        """The op to run now, or None when nothing is queued."""
        if not self._queues:
            return None
        self._now = min(self._had[model_id] for model_id in self._queues)
        model_id = self._turn = _choice(self._queues, self._had, self._turn)
        cost, op = self._queues[model_id].popleft()
        self._had[model_id] += cost
        if not self._queues[model_id]:
            del self._queues[model_id]
        self._forget_rested()
        return op

    def take_beside(self, is_wanted: Callable[[T], bool]) -> list[T]:
        """Of each model with work its next op, if it ``is_wanted``; asked in the order of turns.

        For ops that are cheaper together than apart. They cost their models what they always do.
        """
        taken = []
        for model_id in sorted(self._queues, key=self._had.__getitem__):
            queue = self._queues[model_id]
            if is_wanted(queue[0][1]):
                cost, op = queue.popleft()
                self._had[model_id] += cost
                taken.append(op)
                if not queue:
                    del self._queues[model_id]
        return taken

    def drop(self, model_id: str) -> list[T]:
        """Remove a model with everything it has queued."""
        self._had.pop(model_id, None)
        return [op for _, op in self._queues.pop(model_id, ())]

    def places(self) -> dict[str, Place]:
        """Where each model with work stands, if nothing is added."""
        had = {model_id: self._had[model_id] for model_id in self._queues}
        queues = {model_id: deque(queue) for model_id, queue in self._queues.items()}
        places: dict[str, Place] = {}
        turns, tokens, model_id = 0, 0, self._turn
        while len(places) < len(self._queues):
            model_id = _choice(queues, had, model_id)
            places.setdefault(model_id, Place(turns, tokens))
            cost, _ = queues[model_id].popleft()
            had[model_id] += cost
            turns, tokens = turns + 1, tokens + cost
            if not queues[model_id]:
                del queues[model_id]
        return places

    def _forget_rested(self) -> None:
        """Models without work that others have caught up with start afresh, like new ones."""
        for model_id in [m for m, had in self._had.items() if had <= self._now]:
            if model_id not in self._queues:
                del self._had[model_id]


def _choice(waiting: Collection[str], had: Mapping[str, int], turn: str) -> str:
    """Whose turn is next of those ``waiting``, when it was that of ``turn``."""
    least = min(waiting, key=had.__getitem__)  # of equals, who came first
    stays = turn in waiting and had[turn] < had[least] + QUANTUM
    return turn if stays else least

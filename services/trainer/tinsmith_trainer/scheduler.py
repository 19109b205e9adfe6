"""Decides whose op runs next: deficit round-robin over models, in tokens. Pure.

Every model gets the same share of tokens however many ops its neighbours have queued; ops of
one model keep their order. See Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit
Round-Robin" (1996).
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM_TOKENS = 2048
"""What a model may spend per round; a dearer op waits until it has saved up for it."""


class Scheduler(Generic[T]):
    """Queues of (cost, op) by model."""

    def __init__(self, quantum: int = QUANTUM_TOKENS) -> None:
        self._quantum = quantum
        self._queues: dict[str, deque[tuple[int, T]]] = {}
        self._deficit: dict[str, int] = {}
        self._round: deque[str] = deque()  # models with work, the next one first

    def add(self, model_id: str, op: T, *, cost: int) -> None:
        """Queue ``op`` behind the model's earlier ones; ``cost`` is its number of tokens."""
        queue = self._queues.setdefault(model_id, deque())
        if not queue:
            self._round.append(model_id)
        queue.append((cost, op))

    def take(self) -> T | None:
        """The op to run now, or None when nothing is queued."""
        while self._round:
            model_id = self._round[0]
            queue = self._queues[model_id]
            cost, op = queue[0]
            if cost > self._deficit.get(model_id, 0) and len(self._round) > 1:
                self._deficit[model_id] = self._deficit.get(model_id, 0) + self._quantum
                self._round.rotate(-1)
                continue
            queue.popleft()
            if queue:
                self._deficit[model_id] = max(0, self._deficit.get(model_id, 0) - cost)
            else:  # an idle model saves nothing up
                self._forget(model_id)
            return op
        return None

    def drop(self, model_id: str) -> list[T]:
        """Remove a model with everything it has queued."""
        queued = [op for _, op in self._queues.get(model_id, ())]
        if queued:
            self._forget(model_id)
        return queued

    def waiting(self, model_id: str) -> int:
        """How many ops of ``model_id`` are queued."""
        return len(self._queues.get(model_id, ()))

    def _forget(self, model_id: str) -> None:
        self._round.remove(model_id)
        self._queues.pop(model_id, None)
        self._deficit.pop(model_id, None)

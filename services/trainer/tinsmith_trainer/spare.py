"""The memory of a copy that has been written, kept for the next one.

Memory that is touched for the first time costs several times what copying into it does, and a step
may be waiting for the copy. One is kept, of an adapter; those of whole models are too large.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tinsmith_trainer.adapters import LoraLayout

if TYPE_CHECKING:
    from tinsmith_trainer.trainable import Snapshot, Trainable


class Spare:
    """Used from any thread."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque(maxlen=1)

    def keep(self, snapshot: Snapshot) -> None:
        """Nobody reads ``snapshot`` any more."""
        if isinstance(snapshot.layout, LoraLayout):
            self._kept.append(snapshot)

    def take(self, tenant: Trainable) -> Snapshot | None:
        """What a copy of ``tenant`` may be written over; None if there is nothing of its size."""
        try:
            found = self._kept.pop()
        except IndexError:
            return None
        mine, theirs = tenant.optimizer, found.optimizer
        sizes = (tenant.weights.shape, mine.exp_avg_sq.shape)
        return found if sizes == (found.weights.shape, theirs.exp_avg_sq.shape) else None

"""When a model's state is saved for the next owner. Pure, but for the clock it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SnapshotPolicy:
    """Every so many steps or seconds, whichever comes first, and never two at once."""

    def __init__(self, *, steps: int, seconds: float, clock: Callable[[], float]) -> None:
        """``clock`` is monotonic, in seconds."""
        self._every_steps = steps
        self._every_s = seconds
        self._clock = clock
        self._steps = 0
        self._since_s = clock()
        self._is_saving = False

    def is_due(self) -> bool:
        """Count one step; True when its state is to be saved, which the caller then does."""
        self._steps += 1
        if self._is_saving:
            return False
        waited_s = self._clock() - self._since_s
        if self._steps < self._every_steps and waited_s < self._every_s:
            return False
        self._steps, self._since_s, self._is_saving = 0, self._clock(), True
        return True

    def done(self) -> None:
        """The save has ended, well or not."""
        self._is_saving = False

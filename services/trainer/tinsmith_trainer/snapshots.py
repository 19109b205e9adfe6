"""When a model's state is saved for the next owner. Pure, but for the clock it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Unsaved:
    """A model's newest state, of which its log has no copy."""

    op_seq: int
    """The op that made it."""
    state_blake3: str


class SnapshotPolicy:
    """Every so many steps or seconds, whichever comes first, and never two at once."""

    def __init__(
        self,
        *,
        steps: int,
        seconds: float,
        clock: Callable[[], float],
        steps_before: int = 0,
        seconds_before: float = 0.0,
    ) -> None:
        """``clock`` is monotonic, in seconds.

        What a new owner had to repeat, and for how long it did, counts as its own: where owners
        are replaced again and again, what each of them has to repeat must not grow.
        """
        self._every_steps = steps
        self._every_s = seconds
        self._clock = clock
        self._steps = steps_before
        self._since_s = clock() - seconds_before
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

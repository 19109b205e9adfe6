"""Whether this sampler's engine is all right, and how much it takes when it is not.

One that fails again and again would be the fastest of all, and take everybody's requests only to
give them back. So it pauses, longer each time, and then tries with one request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FAILURES = 3  # one after the other, without an answer in between
PAUSE_S = 2.0
LONGEST_PAUSE_S = 30.0


class Condition:
    """Counts what the engine could not answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._until = clock()
        self.trouble = ""
        """In words for clients; empty when it is all right."""

    def answered(self) -> None:
        """The engine has done its work."""
        self._failures = 0
        self.trouble = ""

    def failed(self, error: Exception) -> None:
        """It has not; what was begun before a pause counts as one with what led to it."""
        if self._is_pausing():
            return
        self._failures += 1
        if (over := self._failures - FAILURES) >= 0:
            pause = min(PAUSE_S * 2**over, LONGEST_PAUSE_S)
            self._until = self._clock() + pause
            self.trouble = (
                f"a sampler's engine has failed {self._failures} times in a row, the last time "
                f"with: {str(error)[:300]}; it is tried again every {pause:g} s"
            )

    def room(self, free: int, running: int) -> int:
        """How many requests may be taken, of those that there is room for."""
        if not self.trouble:
            return free
        return 0 if self._is_pausing() or running else min(free, 1)

    def _is_pausing(self) -> bool:
        return bool(self.trouble) and self._clock() < self._until

"""A clock that a test moves."""

from __future__ import annotations


class Clock:
    """Tells ``now``, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """As ``time.monotonic`` is called."""
        return self.now

"""Requests that failed here and were given back, so that others get them and not this sampler."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tinsmith.messages.table import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tinsmith.bus import Taken

TRIES = 16
"""Deliveries of a request in which it may be given back. A request of ours that waits at the
broker may get it again, and is not an attempt."""
WHILE_S = 3.0
BACK_S = 0.1  # that it rests before it is delivered again


class Declined:
    """By subject, until when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def add(self, taken: Taken[Any]) -> float:
        """It failed here, or came again; for how long it is to rest."""
        self._until.setdefault(taken.subject, self._clock() + WHILE_S)
        return BACK_S

    def has(self, taken: Taken[Any]) -> bool:
        """Whether it was given back not long ago."""
        return taken.subject in self._now()

    def allows(self, taken: Taken[Any]) -> bool:
        """Whether it may be given back once more."""
        return taken.attempts < TRIES

    def without(self, priorities: Mapping[str, int]) -> dict[str, int]:
        """``priorities`` of the shares that have none of them."""
        avoided = {SAMPLES.tokens(subject)["share"] for subject in self._now()}
        return {share: value for share, value in priorities.items() if share not in avoided}

    def _now(self) -> dict[str, float]:
        if self._until:
            now = self._clock()
            self._until = {key: until for key, until in self._until.items() if until > now}
        return self._until

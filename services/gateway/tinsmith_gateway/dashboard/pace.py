"""How fast runs go: the tokens and the failures of the last minute's operations, by their headers.

Headers tell what an operation cost, so that no record is read for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.bus.facts import Fact

WINDOW_S = 60.0
FIRST_LOOK = 2000
"""Entries of the log that are looked back at, at first: a bound, whatever the log holds."""
MAX_AHEAD = 20_000
"""After a pause with more entries than this, it starts anew."""
KEPT_FAILURES = 200


class Failure(NamedTuple):
    """An operation that failed."""

    model_id: str
    seq: int
    at_s: float


class Pace:
    """Fed from the log whenever somebody looks."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen = 0  # stream sequence
        self._recent: deque[tuple[float, str, int]] = deque()
        self.failures: deque[Failure] = deque(maxlen=KEPT_FAILURES)
        """The newest, oldest first."""

    async def read(self, now_s: float) -> None:
        """Take in what was committed since. Raises BrokerUnavailable."""
        newest = await self._bus.facts.newest()
        if newest - self._seen > MAX_AHEAD:
            self._seen = max(0, newest - FIRST_LOOK)
        if newest > self._seen:
            async for fact in self._bus.facts.of_log(first=self._seen + 1, model="*"):
                self._note(fact)
                self._seen = fact.stream_seq
        while self._recent and self._recent[0][0] < now_s - WINDOW_S:
            self._recent.popleft()

    def tokens_per_s(self) -> dict[str, float]:
        """By model, over the last minute; models that computed nothing are absent."""
        sums: dict[str, int] = {}
        for _, model_id, tokens in self._recent:
            sums[model_id] = sums.get(model_id, 0) + tokens
        return {model_id: tokens / WINDOW_S for model_id, tokens in sums.items()}

    def _note(self, fact: Fact) -> None:
        if fact.costs is None:
            return
        if fact.costs.trained:
            self._recent.append((fact.at_s, fact.target, fact.costs.trained))
        if fact.costs.failed:
            self.failures.append(Failure(fact.target, fact.seq, fact.at_s))

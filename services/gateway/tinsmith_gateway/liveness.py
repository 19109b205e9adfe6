"""Which base models are served right now, told from the services' pings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.messages.services import ServiceAlive

Role = Literal["trainer", "sampler"]
MAX_GAP_S = 30.0  # between two ticks: the process was suspended, or its loop was blocked


class Hearing:
    """Since when this gateway could hear all the others without a break.

    Silence means nothing for the time in which nobody could be heard: a gateway that was cut
    off, suspended or just started must not take the others for dead.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.since = self._ticked = clock()

    def tick(self, *, is_connected: bool) -> None:
        """To be called every few seconds."""
        now = self.clock()
        if not is_connected or now - self._ticked > MAX_GAP_S:
            self.since = now
        self._ticked = now

    def silent_s(self, heard_at: float | None) -> float:
        """For how long something has been silent that was last heard at ``heard_at``, if ever."""
        since = self.since if heard_at is None else max(heard_at, self.since)
        return self.clock() - since


class Services:
    """When each base model was last served, by role."""

    def __init__(self, hearing: Hearing) -> None:
        self._hearing = hearing
        self._heard: dict[tuple[str, str], float] = {}

    def heard(self, alive: ServiceAlive) -> None:
        """A service's ping."""
        now = self._hearing.clock()
        for model in alive.base_models:
            self._heard[alive.service, model] = now

    def silent_s(self, role: Role, base_model: str) -> float:
        """For how long no service of that role has served the model; 0 up to the ping interval."""
        return self._hearing.silent_s(self._heard.get((role, base_model)))

"""Which base models are served right now, told from the services' pings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.messages.services import ServiceAlive

Role = Literal["trainer", "sampler"]
FORGET_S = 60.0  # an instance that has been silent for so long does not come back
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
        self._pings: dict[str, tuple[float, ServiceAlive]] = {}  # the last one of each instance

    def heard(self, alive: ServiceAlive) -> None:
        """A service's ping."""
        now = self._hearing.clock()
        if alive.instance not in self._pings:
            self._pings = {k: v for k, v in self._pings.items() if now - v[0] < FORGET_S}
        self._pings[alive.instance] = now, alive
        for model in alive.base_models:
            self._heard[alive.service, model] = now

    def serving(self, role: Role, base_model: str, within_s: float) -> list[ServiceAlive]:
        """The last pings of all who serve the model and were heard ``within_s``."""
        since = self._hearing.clock() - within_s
        return [
            alive
            for heard_at, alive in self._pings.values()
            if heard_at >= since and alive.service == role and base_model in alive.base_models
        ]

    def silent_s(self, role: Role, base_model: str) -> float:
        """For how long no service of that role has served the model; 0 up to the ping interval."""
        return self._hearing.silent_s(self._heard.get((role, base_model)))

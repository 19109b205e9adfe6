"""What is known of an installation at a moment: what was heard, and what the registry says."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinsmith.weights.roll import Roll

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.bus.books import BrokerState, LastOp, StreamState
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import ApiKey, Run, ServedModel, Session
    from tinsmith.messages.services import ServiceAlive
    from tinsmith.messages.weights import LineageHead

STALE_S = 7.0
"""Services say every two seconds that they live; three are missed before one counts as gone."""


class Pings:
    """The last liveness ping of each instance."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[float, ServiceAlive]] = {}

    def hear(self, alive: ServiceAlive) -> None:
        """The handler of the event."""
        self._heard[alive.instance] = self._clock(), alive

    def alive(self) -> list[ServiceAlive]:
        """Of those that are there now, by service and instance."""
        since = self._clock() - STALE_S
        self._heard = {key: found for key, found in self._heard.items() if found[0] >= since}
        pings = [alive for _, alive in self._heard.values()]
        return sorted(pings, key=lambda alive: (alive.service, alive.instance))


@dataclass
class Registry:
    """Entries by their keys. A gateway has most of them at hand already."""

    sessions: dict[str, Session] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    served: dict[str, ServedModel] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    heads: dict[str, LineageHead] = field(default_factory=dict)
    keys: dict[str, ApiKey] = field(default_factory=dict)


@dataclass
class Measured:
    """What the broker and the logs said when they were asked."""

    broker: BrokerState | None = None
    streams: list[StreamState] = field(default_factory=list)
    subjects: dict[str, set[str]] = field(default_factory=dict)
    """Of each queue's stream."""
    last_ops: dict[str, LastOp] = field(default_factory=dict)
    """By model."""
    owners: dict[str, str] = field(default_factory=dict)
    """Model -> the instance that took its log last."""
    unknown: list[str] = field(default_factory=list)
    """What was not told, in sentences."""


@dataclass
class Known:
    """All of it; ``telling.tell`` makes an ``Overview`` of it."""

    pings: Pings = field(default_factory=Pings)
    roll: Roll = field(default_factory=Roll)
    registry: Registry = field(default_factory=Registry)
    measured: Measured = field(default_factory=Measured)


def is_live(run: Run, registry: Registry) -> bool:
    """Whether somebody may still train it."""
    return not why_ended(run, registry)


def why_ended(run: Run, registry: Registry) -> str:
    """In a word; empty for a live run."""
    if run.unloaded_ns is not None:
        return "released"
    session = registry.sessions.get(run.session_id)
    if session is None:
        return "its session is gone"
    return "" if session.status == "active" else session.status

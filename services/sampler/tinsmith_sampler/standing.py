"""How the engines that follow lineages stand: what they serve, and which are fenced."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, get_args

from tinsmith.health import Readiness
from tinsmith.messages.weights import ReplicaState
from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from tinsmith.messages.weights import WeightsStatus

FENCED = "weights_fenced"
"""Figure in the liveness pings: lineages whose weights were found wrong, and are served by none."""


class Standing:
    """The last status of each lineage that is followed here."""

    def __init__(self, figures: dict[str, float]) -> None:
        """``figures`` are those of the liveness pings."""
        self._figures = figures
        self._heard: dict[str, WeightsStatus] = {}

    def hear(self, status: WeightsStatus) -> None:
        """A receiver's news."""
        before = self._heard.get(status.lineage_id)
        self._heard[status.lineage_id] = status
        _count(before, status)
        self._changed()

    def gone(self, lineage_id: str) -> None:
        """It is followed no more."""
        self._heard.pop(lineage_id, None)
        self._changed()

    def readiness(self) -> Readiness:
        """Without what is fenced, models cannot be sampled from."""
        fenced = [status for status in self._heard.values() if status.state == "fenced"]
        return Readiness(
            missing=tuple(
                f"fenced: the weights of a model that was trained whole are not what they should "
                f"be, and are not served: {status.reason}"
                for status in fenced
            )
        )

    def _changed(self) -> None:
        states = Counter(status.state for status in self._heard.values())
        for state in get_args(ReplicaState):
            metrics.REPLICAS.labels(state).set(states[state])
        metrics.BEHIND.set(max((status.behind for status in self._heard.values()), default=0))
        self._figures[FENCED] = float(states["fenced"])


def _count(before: WeightsStatus | None, now: WeightsStatus) -> None:
    received, mismatches, version = 0, 0, 0
    if before is not None and before.received_bytes <= now.received_bytes:  # the same receiver
        received, mismatches = before.received_bytes, before.mismatches
        version = before.version
    metrics.RECEIVED_BYTES.inc(now.received_bytes - received)
    metrics.MISMATCHES.inc(max(0, now.mismatches - mismatches))
    if now.version not in (0, version):
        metrics.LAG_SECONDS.observe(now.lag_ms / 1e3)
        metrics.STAGE_SECONDS.observe(now.stage_ms / 1e3)
        metrics.WEIGHTS_PAUSE_SECONDS.observe(now.pause_ms / 1e3)

"""What a metric is declared with, so that one list can be served, documented and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client.metrics import MetricWrapperBase

T = TypeVar("T", bound="MetricWrapperBase")

Kind = Literal["counter", "gauge", "histogram"]
PREFIX = "tinsmith_"

SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets of durations, from a round trip on the bus to a long pass."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the lines, for no question


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One line of the list."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    services: tuple[str, ...]  # that tell it
    metric: MetricWrapperBase


class Catalogue:
    """Declares metrics of some services, each in a registry of no process yet."""

    def __init__(self, into: dict[str, Declared], *services: str) -> None:
        self._into = into
        self._services = services

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """What only rises; ``name`` ends in ``_total``."""
        made = Counter(PREFIX + name, text, labels, registry=None)
        return self._add(name, "counter", labels, text, made)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """What rises and falls."""
        made = Gauge(PREFIX + name, text, labels, registry=None)
        return self._add(name, "gauge", labels, text, made)

    def histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS
    ) -> Histogram:
        """How often which values were seen; seconds, unless ``name`` says something else."""
        made = Histogram(PREFIX + name, text, labels, registry=None, buckets=buckets)
        return self._add(name, "histogram", labels, text, made)

    def _add(self, name: str, kind: Kind, labels: tuple[str, ...], text: str, made: T) -> T:
        full = PREFIX + name
        if full in self._into:
            raise ValueError(f"{full} is declared twice")
        self._into[full] = Declared(
            name=full, kind=kind, labels=labels, help=text, services=self._services, metric=made
        )
        return made

"""A process's metrics as text that Prometheus reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from tinsmith.metrics import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Exposition:
    """What one service tells: its part of the list, its process, and what an engine adds."""

    def __init__(self, service: str) -> None:
        self._service = service
        self.base_model = ""
        """Label of every line; a service of several models has none."""
        self.others: list[Collector] = []
        """Collectors of parts that have metrics of their own, as an engine may; their names are
        theirs and not in our list."""
        self._process = ProcessCollector(registry=None)

    def text(self) -> bytes:
        """Everything, as of now."""
        return generate_latest(self)  # it asks for collect() alone

    def collect(self) -> Iterator[Metric]:
        """As a registry of prometheus_client does."""
        for declared in names.ALL.values():
            if self._service in declared.services:
                yield from self._labelled(declared.metric.collect())
        for collector in (self._process, *self.others):
            yield from self._labelled(collector.collect())

    def _labelled(self, families: Iterable[Metric]) -> Iterator[Metric]:
        ours = {"service": self._service, "base_model": self.base_model}
        for family in families:
            if not family.samples:
                continue
            told = Metric(family.name, family.documentation, family.type, family.unit)
            told.samples = [
                sample._replace(labels={**ours, **sample.labels}) for sample in family.samples
            ]
            yield told

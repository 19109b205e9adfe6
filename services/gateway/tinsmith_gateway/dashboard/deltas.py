"""Published versions of weights: how much each changed, and how many bytes it was."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import msgspec

from tinsmith.messages.weights import Form, WeightsStored

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.overview.facts import Lineage

SHOWN = 100
"""Versions, the newest."""
KEPT = 64
"""Lineages that are remembered."""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version, in one form."""

    version: int
    form: Form
    size: int  # bytes of its chunks
    changed: int  # elements; 0 of a whole state
    elements: int
    step: int
    at_s: float


class DeltaReader:
    """Reads them from the chains of lineages, again when there is a new version."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: OrderedDict[str, tuple[int, list[Version]]] = OrderedDict()

    async def read(self, lineage: Lineage) -> list[Version]:
        """Those since the newest whole state, oldest first. Raises BrokerUnavailable."""
        known = self._known.get(lineage.lineage_id)
        if known is not None and known[0] == lineage.version:
            return known[1]
        found: deque[Version] = deque(maxlen=SHOWN)
        lineages = self._bus.lineages
        start = await lineages.start(lineage.lineage_id)
        async for entry in lineages.entries(lineage.lineage_id, first=start):
            stored = entry.message
            if isinstance(stored, WeightsStored) and stored.form != "skip":
                found.append(_version(stored))
        versions = list(found)
        self._known[lineage.lineage_id] = lineage.version, versions
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return versions


def _version(stored: WeightsStored) -> Version:
    return Version(
        version=stored.version,
        form=stored.form,
        size=stored.size,
        changed=stored.changed,
        elements=stored.elements,
        step=stored.step,
        at_s=stored.time_ns / 1e9,
    )

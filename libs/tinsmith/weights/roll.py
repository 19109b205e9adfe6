"""Who serves what: the statuses of replicas, by lineage, as long as they are heard of."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.messages.weights import WeightsStatus

SILENT_S = 30.0
"""A replica that is not heard of for so long is not waited for any more."""


class Roll:
    """Fed with every ``WeightsStatus``; made beside a publisher, or by who routes requests."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[tuple[str, str], tuple[float, WeightsStatus]] = {}
        self._changed = asyncio.Event()

    def hear(self, status: WeightsStatus) -> None:
        """The handler of the event."""
        self._heard[status.lineage_id, status.replica] = (self._clock(), status)
        self._changed.set()

    def replicas(self, lineage_id: str) -> list[WeightsStatus]:
        """Those of the lineage that are alive."""
        silent = self._clock() - SILENT_S
        self._heard = {key: found for key, found in self._heard.items() if found[0] > silent}
        return [s for _, s in self._heard.values() if s.lineage_id == lineage_id]

    def live(self, lineage_id: str) -> list[int]:
        """The versions that are served, for ``Publisher.upkeep``."""
        return [status.version for status in self.replicas(lineage_id) if status.version]

    def wants_full(self, lineage_id: str) -> bool:
        """Whether a replica cannot catch up with what is kept."""
        return any(status.wants_full for status in self.replicas(lineage_id))

    def disagreeing(self, lineage_id: str) -> list[tuple[WeightsStatus, WeightsStatus]]:
        """Pairs that serve one version in one plane, and other bits: never, unless one is wrong."""
        first: dict[tuple[int, str], WeightsStatus] = {}
        found = []
        for status in self.replicas(lineage_id):
            if status.version:
                other = first.setdefault((status.version, status.plane), status)
                if (other.root, other.plane_root) != (status.root, status.plane_root):
                    found.append((other, status))
        return found

    async def active(self, lineage_id: str, version: int, *, count: int, timeout_s: float) -> int:
        """Wait until ``count`` replicas serve ``version`` or newer; how many do, at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                while (there := self._at(lineage_id, version)) < count:
                    self._changed.clear()
                    await self._changed.wait()
                return there
        except TimeoutError:
            return self._at(lineage_id, version)

    def _at(self, lineage_id: str, version: int) -> int:
        return sum(served >= version for served in self.live(lineage_id))

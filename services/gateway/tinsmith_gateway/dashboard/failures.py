"""What went wrong of late: operations that failed, in the words that their clients were told."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from tinsmith.errors import BlobMissing
from tinsmith.messages.base import Failed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.bus import Bus
    from tinsmith.sealing import Seals
    from tinsmith_gateway.dashboard.pace import Failure

SHOWN = 20
KEPT = 500


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One failure."""

    model_id: str
    seq: int
    at_s: float
    category: str
    message: str


class FailureReader:
    """Reads and remembers the words of failures."""

    def __init__(self, bus: Bus, seals: Seals) -> None:
        self._bus = bus
        self._seals = seals
        self._known: OrderedDict[tuple[str, int], Failed | None] = OrderedDict()

    async def read(self, failures: Iterable[Failure]) -> list[Told]:
        """The first ``SHOWN`` of them; not those of a run that is forgotten, or sealed for us."""
        found: list[Told] = []
        for one in failures:
            if len(found) == SHOWN:
                break
            failed = await self._words(one)
            if failed is not None:
                found.append(
                    Told(
                        model_id=one.model_id,
                        seq=one.seq,
                        at_s=one.at_s,
                        category=failed.category,
                        message=failed.message,
                    )
                )
        return found

    async def _words(self, one: Failure) -> Failed | None:
        seal = await self._seals.of(one.model_id)
        if seal.why_closed is not None:
            return None
        key = one.model_id, one.seq
        if key not in self._known:
            record = await self._bus.log.get(*key)
            result = None
            if record is not None:
                with contextlib.suppress(BlobMissing):
                    result = await self._bus.log.result(record, seal)
            self._known[key] = result if isinstance(result, Failed) else None
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return self._known[key]

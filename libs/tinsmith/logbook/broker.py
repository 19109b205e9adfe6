"""The logs of a running installation, read from its broker and its blob store."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinsmith.bus.log import subject_of
from tinsmith.errors import BlobMissing
from tinsmith.logbook.anchors import read_chain
from tinsmith.logbook.entry import Entry, LogDamaged, place_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import Bus
    from tinsmith.logbook.anchors import Chain
    from tinsmith.messages.anchors import PrunedLog
    from tinsmith.messages.base import BlobRef
    from tinsmith.sealing import Seal, Seals

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BrokerLogbook:
    """A ``Logbook``."""

    def __init__(self, bus: Bus, blobs: BlobStore, seals: Seals) -> None:
        self._log = bus.log
        self._pruning = bus.pruning
        self._anchors = bus.anchors
        self._blobs = blobs
        self._seals = seals
        self._chain: Chain | None = None

    async def runs(self) -> list[str]:
        """See ``Logbook``; without those that are being pruned."""
        runs = await self._log.models()
        pruned = await self._pruning.marks()
        return [run for run in runs if run not in pruned]

    async def pruned(self) -> dict[str, PrunedLog]:
        """See ``Logbook``."""
        return await self._pruning.marks()

    async def length(self, model_id: str) -> int:
        """See ``Logbook``."""
        return await self._log.length(model_id)

    async def entries(self, model_id: str) -> AsyncIterator[Entry]:
        """See ``Logbook``."""
        number = 0
        async for subject, data in self._log.stored(model_id):
            number += 1
            yield _checked(model_id, number, subject, data)

    async def follow(self, model_id: str) -> AsyncIterator[Entry]:
        """Every entry of the model in order, those to come too, until the caller stops."""
        number = 0
        async for subject, data in self._log.follow(model_id):
            number += 1
            yield _checked(model_id, number, subject, data)

    async def newest(self, model_id: str) -> list[Entry]:
        """See ``Logbook``."""
        found = await self._log.newest(model_id)
        return [Entry.read(data, subject) for subject, data in found]

    async def anchors(self, *, is_fresh: bool = False) -> Chain:
        """See ``Logbook``."""
        if self._chain is None or is_fresh:
            self._chain = await read_chain(self._anchors.stored())
        return self._chain

    async def seal(self, model_id: str) -> Seal:
        """See ``Logbook``."""
        return await self._seals.of(model_id)

    async def blob(self, ref: BlobRef) -> bytes:
        """See ``Logbook``."""
        if _DIGEST.fullmatch(ref.blake3) is None:
            raise BlobMissing(f"blob {ref.blake3[:80]!r}: not the name of a blob")
        return await self._blobs.get(ref)

    async def check_blob(self, ref: BlobRef) -> None:
        """See ``Logbook``."""
        await self.blob(ref)


def _checked(model_id: str, number: int, subject: str, data: bytes) -> Entry:
    """The entry in ``data``; LogDamaged when it does not belong where it lies."""
    entry = Entry.read(data, f"entry {number} ({subject})")
    place = place_of(entry.entry, number)
    if entry.entry.model_id != model_id:
        raise LogDamaged(place, "model_id", f"{entry.entry.model_id!r} is not {model_id}")
    if subject != subject_of(entry.entry):
        # Futures are read by subject: under another one, it is another op's answer.
        problem = f"stored under {subject}, not {subject_of(entry.entry)}"
        raise LogDamaged(place, "subject", problem)
    return entry

"""Frees the bytes of parts that nothing needs any more.

A part is freed when it was discarded, and last put, longer ago than a grace; when nothing that is
registered or logged refers to it at the end of that time; and when nobody puts it at the very
moment. What is still needed is left to whoever discards it last.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import structs

from tinsmith.messages import table
from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from collections.abc import Container

    from structlog.stdlib import BoundLogger

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import Bus
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import Discarded
    from tinsmith_checkpointer.references import References


class Sweep:
    """Works off what was discarded. Several may at the same time: a part is freed once."""

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        references: References,
        logger: BoundLogger,
        *,
        grace_s: float,
    ) -> None:
        self._table = bus.table(table.DISCARDED)
        self._blobs = blobs
        self._log = logger
        self._grace_s = grace_s
        self._references = references
        self._notes: dict[str, Discarded] = {}

    def note(self, key: str, discarded: Discarded | None) -> None:
        """A change in the table of what was discarded."""
        if discarded is None:
            self._notes.pop(key, None)
        else:
            self._notes[key] = discarded
        metrics.DISCARDED.set(len(self._notes))

    async def run(self) -> int:
        """Free what is due now; how many bytes that was.

        Raises:
            ServerError: something could not be read or deleted; what was not reached stays.
        """
        before_ns = time.time_ns() - int(self._grace_s * 1e9)
        due = {k: note for k, note in self._notes.items() if note.discarded_ns <= before_ns}
        if not due:
            return 0
        needed = await self._references.of_parts()
        return sum([await self._free(key, note, needed) for key, note in due.items()])

    async def _free(self, key: str, note: Discarded, needed: Container[str]) -> int:
        kept: dict[str, BlobRef] = {}
        freed = 0
        for name, ref in note.parts.items():
            if ref.blake3 in needed:
                continue
            if await self._blobs.free(ref, unused_s=self._grace_s):
                freed += ref.size
            else:
                kept[name] = ref  # put again not long ago: look again after a while
        if kept:
            later = structs.replace(note, parts=kept, discarded_ns=time.time_ns())
            await self._table.put(key, later)
        else:
            await self._table.delete(key)
        metrics.FREED_BYTES.inc(freed)
        self._log.info("parts freed", path=note.path, freed_bytes=freed, kept=sorted(kept))
        return freed

"""Notes which parts have lost a reference, before it is gone: nothing that may be freed is lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinsmith.ids import token
from tinsmith.messages import table
from tinsmith.messages.checkpoints import Discarded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.bus import Bus
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import Sampler


class Discards:
    """Writes the notes that the sweep works off."""

    def __init__(self, bus: Bus) -> None:
        self._table = bus.table(table.DISCARDED)

    async def of_checkpoint(self, key: str, checkpoint: Checkpoint) -> None:
        """The checkpoint under ``key`` is about to end, or to be replaced."""
        await self._note(key, checkpoint.path, checkpoint.parts)

    async def of_parts(self, key: str, path: str, parts: Mapping[str, BlobRef]) -> None:
        """What goes into the checkpoint under ``key`` may be left out of it, all or some."""
        await self._note(key, path, parts)

    async def of_sampler(self, sampler: Sampler) -> None:
        """The sampler is about to end, or to move on to other weights."""
        if sampler.adapter is not None and sampler.model_path is None:
            await self._note(token(sampler.sampler_id), sampler.sampler_id, sampler.adapter.files)

    async def _note(self, key: str, path: str, parts: Mapping[str, BlobRef]) -> None:
        now_ns = time.time_ns()
        if parts:
            note = Discarded(path=path, parts=dict(parts), discarded_ns=now_ns)
            await self._table.put(f"{key}-{now_ns}", note)

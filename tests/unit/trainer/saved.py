"""States that were saved for the next owner, as an executor writes them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.blobs import BlobStore
from tinsmith_trainer.executor import Executor

if TYPE_CHECKING:
    from tinsmith_trainer.engine import Snapshot, TrainingEngine


def saved(engine: TrainingEngine, snapshot: Snapshot) -> dict[str, bytes]:
    """What the parts of ``snapshot``, which is spent, are in the blob store."""

    async def stored() -> dict[str, bytes]:
        blobs = BlobStore.open("memory:///", default=Path())
        executor = Executor(engine, None, None, blobs, base_model="", patience_s=0)
        return {
            name: await blobs.get(ref) for name, ref in (await executor.store(snapshot)).items()
        }

    with ThreadPoolExecutor(1) as thread:  # the caller may have a loop of its own
        return thread.submit(asyncio.run, stored()).result()

"""The checkpointer process: answers commit and get until it is told to stop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.errors import BlobMissing, InvalidRequest, NotFound
from tinsmith.messages import table
from tinsmith.messages.checkpoints import Checkpoint, CommitCheckpoint, CommitCheckpointDone
from tinsmith.service import run_service
from tinsmith_checkpointer import manifest
from tinsmith_checkpointer.config import CheckpointerConfig

if TYPE_CHECKING:
    from tinsmith.config import Config
    from tinsmith.messages.checkpoints import GetCheckpoint
    from tinsmith.service import ServiceContext


class Checkpointer:
    """Commits checkpoints: parts first, the manifest in the registry last."""

    def __init__(self, context: ServiceContext) -> None:
        self._blobs = context.blobs
        self._checkpoints = context.bus.table(table.CHECKPOINTS)
        self._runs = context.bus.table(table.RUNS)
        self._samplers = context.bus.table(table.SAMPLERS)
        self._config = context.config.section(CheckpointerConfig)
        self._log = context.log

    async def commit(self, request: CommitCheckpoint) -> CommitCheckpointDone:
        """Make the parts a checkpoint. A repeat of the same request changes nothing.

        Raises:
            InvalidRequest: the name is taken, or the parts are too many.
            BlobMissing: a part is not in the blob store.
            NotFound: the run is not registered.
        """
        await self._check_parts(request)
        run = await self._runs.get(ids.token(request.model_id))
        if run is None:
            msg = f"model_id: there is no run {request.model_id}"
            raise NotFound(msg)
        made = manifest.build(request, owner=run.owner, now_ns=time.time_ns())
        if request.sampling_session_id is None:
            made = await self._publish(request, made)
        else:
            sampler = manifest.sampler_of(
                made, request.sampling_session_id, session_id=run.session_id
            )
            await self._samplers.create(ids.token(sampler.sampler_id), sampler)
        self._log.info("checkpoint committed", path=made.path, size_bytes=made.size_bytes)
        return CommitCheckpointDone(path=made.path, size_bytes=made.size_bytes)

    async def get(self, request: GetCheckpoint) -> Checkpoint:
        """The manifest of a path. Raises NotFound or, after its time to live, Gone."""
        path = ids.parse_path(request.path)
        found = await self._checkpoints.get(ids.checkpoint_key(path))
        if found is None:
            msg = f"path: there is no checkpoint {path}"
            raise NotFound(msg)
        return manifest.check_alive(found, now_ns=time.time_ns())

    async def _publish(self, request: CommitCheckpoint, made: Checkpoint) -> Checkpoint:
        key = ids.checkpoint_key(manifest.path_of(request))
        existing = await self._checkpoints.create(key, made)
        if existing.op_seq == made.op_seq:
            return existing  # ours, from this attempt or an earlier one
        manifest.check_replaces(existing, request)
        await self._checkpoints.put(key, made)
        return made

    async def _check_parts(self, request: CommitCheckpoint) -> None:
        if len(request.parts) > self._config.max_parts:
            msg = (
                f"parts: {len(request.parts)} files are over checkpointer.max_parts "
                f"({self._config.max_parts})"
            )
            raise InvalidRequest(msg)
        for name, ref in request.parts.items():
            if not await self._blobs.has(ref):
                msg = f"parts: {name} (blob {ref.blake3}) is not in the blob store"
                raise BlobMissing(msg)


async def serve(context: ServiceContext) -> None:
    """Serve until ``context.stopping``."""
    checkpointer = Checkpointer(context)
    subscriptions = [
        await context.bus.serve(table.COMMIT_CHECKPOINT, checkpointer.commit),
        await context.bus.serve(table.GET_CHECKPOINT, checkpointer.get),
    ]
    await context.ready()
    await context.stopping.wait()
    for subscription in subscriptions:
        await subscription.close()


def main(config: Config) -> int:
    """Run the checkpointer; its exit code."""
    return run_service("checkpointer", serve, config)

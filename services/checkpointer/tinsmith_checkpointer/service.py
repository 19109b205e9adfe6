"""The checkpointer process: answers commit and get until it is told to stop."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from msgspec import structs

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.errors import BlobMissing, InvalidRequest, NotFound
from tinsmith.messages import table
from tinsmith.messages.checkpoints import Checkpoint, CommitCheckpoint, CommitCheckpointDone
from tinsmith.metrics import names as metrics
from tinsmith.parts import check_parts
from tinsmith.service import run_service
from tinsmith_checkpointer import manifest
from tinsmith_checkpointer.anchoring import keep_anchoring
from tinsmith_checkpointer.changes import Changes
from tinsmith_checkpointer.config import CheckpointerConfig
from tinsmith_checkpointer.discarding import Discards
from tinsmith_checkpointer.encryption import encrypted
from tinsmith_checkpointer.expiry import check_alive, is_expired
from tinsmith_checkpointer.janitor import Janitor
from tinsmith_checkpointer.meter import Meter
from tinsmith_checkpointer.pruning import Pruner
from tinsmith_checkpointer.retention import RetentionConfig
from tinsmith_checkpointer.upkeep import Upkeep

if TYPE_CHECKING:
    from tinsmith.bus import Subscription
    from tinsmith.config import Config
    from tinsmith.messages.checkpoints import GetCheckpoint
    from tinsmith.messages.registry import Sampler
    from tinsmith.service import ServiceContext


class Checkpointer:
    """Commits checkpoints: parts first, the manifest in the registry last."""

    def __init__(self, context: ServiceContext) -> None:
        self._blobs = context.blobs
        self._checkpoints = context.bus.table(table.CHECKPOINTS)
        self._runs = context.bus.table(table.RUNS)
        self._samplers = View(context.bus.table(table.SAMPLERS), lambda s: s.follows or "")
        self._discards = Discards(context.bus)
        self._config = context.config.section(CheckpointerConfig)
        self._log = context.log
        self._encrypting: dict[str, asyncio.Task[CommitCheckpointDone]] = {}  # by path and op

    async def start(self) -> Subscription:
        """Follow the samplers, to know those that move on."""
        return await self._samplers.watch()

    async def commit(self, request: CommitCheckpoint) -> CommitCheckpointDone:
        """Make the parts a checkpoint, or for recipients, what they are encrypted.

        A repeat of the same request changes nothing.

        Raises:
            InvalidRequest: the name is taken, or the parts are too many.
            BlobMissing: a part is not in the blob store.
            NotFound: the run is not registered.
        """
        outcome = "failed"
        try:
            with metrics.CHECKPOINT_SECONDS.time():
                done = await self._committed(request)
            outcome = "done"
        finally:
            metrics.COMMITS.labels(request.kind, outcome).inc()
        metrics.COMMITTED_BYTES.labels(request.kind).inc(done.size_bytes)
        return done

    async def _committed(self, request: CommitCheckpoint) -> CommitCheckpointDone:
        if not request.recipients:
            return await self._commit(request)
        # It may take longer than whoever asked has waited before asking again.
        name = f"encrypt {manifest.path_of(request)} {request.op_seq}"
        if (task := self._encrypting.get(name)) is None:
            task = asyncio.create_task(self._commit_encrypted(request), name=name)
            self._encrypting[name] = task
            task.add_done_callback(lambda _: self._encrypting.pop(name))
        return await asyncio.shield(task)

    async def _commit_encrypted(self, request: CommitCheckpoint) -> CommitCheckpointDone:
        path = manifest.path_of(request)
        key = ids.checkpoint_key(path)
        existing = await self._checkpoints.get(key)
        if existing is not None and existing.op_seq == request.op_seq:
            await self._discards.of_parts(key, str(path), request.parts)  # stored once more
            return CommitCheckpointDone(path=existing.path, size_bytes=existing.size_bytes)
        await self._check_parts(request)
        # What was encrypted is not kept for this; nor are the ciphertexts if this breaks off, or
        # another came first.
        await self._discards.of_parts(key, str(path), request.parts)
        sealed = await encrypted(
            self._blobs, request, lambda parts: self._discards.of_parts(key, str(path), parts)
        )
        return await self._commit(sealed)

    async def _commit(self, request: CommitCheckpoint) -> CommitCheckpointDone:
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
                made,
                request.sampling_session_id,
                session_id=run.session_id,
                is_inflight=request.is_inflight,
            )
            await self._samplers.table.create(ids.token(sampler.sampler_id), sampler)
            await self._advance(sampler)
        self._log.info("checkpoint committed", path=made.path, size_bytes=made.size_bytes)
        return CommitCheckpointDone(path=made.path, size_bytes=made.size_bytes)

    async def get(self, request: GetCheckpoint) -> Checkpoint:
        """The manifest of a path. Raises NotFound or, after its time to live, Gone."""
        path = ids.parse_path(request.path)
        found = await self._checkpoints.get(ids.checkpoint_key(path))
        if found is None:
            msg = f"path: there is no checkpoint {path}"
            raise NotFound(msg)
        return check_alive(found, now_ns=time.time_ns())

    async def _publish(self, request: CommitCheckpoint, made: Checkpoint) -> Checkpoint:
        key = ids.checkpoint_key(manifest.path_of(request))

        def chosen(existing: Checkpoint | None) -> Checkpoint | None:
            if existing is None:
                return made
            if existing.op_seq == made.op_seq:
                return None  # ours, from this attempt or an earlier one
            if not is_expired(existing, now_ns=made.created_ns):
                manifest.check_replaces(existing, request)
            return made

        existing = await self._checkpoints.get(key)
        if existing is not None and chosen(existing) is not None:
            await self._discards.of_checkpoint(key, existing)
        return await self._checkpoints.update(key, chosen) or made

    async def _advance(self, newest: Sampler) -> None:
        """Move the older inflight samplers of a model on to its newest weights."""
        if newest.follows is None:
            return
        for sampler in self._samplers.group(newest.follows):
            if manifest.is_behind(sampler, newest):
                await self._samplers.table.update(
                    ids.token(sampler.sampler_id), lambda s: _moved(s, newest)
                )
                await self._discards.of_sampler(sampler)

    async def _check_parts(self, request: CommitCheckpoint) -> None:
        check_parts(request.parts)
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


def _moved(sampler: Sampler | None, newest: Sampler) -> Sampler | None:
    if sampler is None or not manifest.is_behind(sampler, newest):
        return None
    return structs.replace(sampler, adapter=newest.adapter)


async def serve(context: ServiceContext) -> None:
    """Serve until ``context.stopping``."""
    checkpointer = Checkpointer(context)
    changes = Changes(context.bus)
    subscriptions = [
        await checkpointer.start(),
        await context.bus.serve(table.COMMIT_CHECKPOINT, checkpointer.commit),
        await context.bus.serve(table.GET_CHECKPOINT, checkpointer.get),
        await context.bus.serve(table.CHANGE_CHECKPOINT, changes.change),
        await context.bus.serve(table.DELETE_CHECKPOINT, changes.delete),
        await context.bus.serve(table.COPY_CHECKPOINT, changes.copy),
    ]
    await context.ready()
    config = context.config.section(CheckpointerConfig)
    async with asyncio.TaskGroup() as tasks:
        beside = (
            tasks.create_task(Upkeep(context, config).run(), name="upkeep"),
            tasks.create_task(_meter(context, config).run(), name="meter"),
            tasks.create_task(Janitor(context).run(), name="janitor"),
            tasks.create_task(_pruner(context).run(), name="pruner"),
        )
        await keep_anchoring(
            context.bus.anchors, context.log, every_s=config.anchor_s, stopping=context.stopping
        )
        for task in beside:
            task.cancel()
    for subscription in subscriptions:
        await subscription.close()


def _meter(context: ServiceContext, config: CheckpointerConfig) -> Meter:
    return Meter(context.bus, context.log, every_s=config.meter_s)


def _pruner(context: ServiceContext) -> Pruner:
    settings = context.config.section(RetentionConfig)
    return Pruner(context.bus, settings, context.log, instance=context.instance)


def main(config: Config) -> int:
    """Run the checkpointer; its exit code."""
    return run_service("checkpointer", serve, config)

"""What each kind of op does: to the engine's tensors, and to checkpoints."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar, assert_never

from tinsmith.errors import BrokerUnavailable, NoResponder
from tinsmith.messages import ops, table
from tinsmith.messages.checkpoints import CommitCheckpoint, CommitCheckpointDone, GetCheckpoint
from tinsmith.messages.failures import to_failed
from tinsmith_trainer.checkpoint_files import to_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from structlog.stdlib import BoundLogger

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import Bus
    from tinsmith.messages.base import BlobRef, Failed
    from tinsmith_trainer.compute import Compute
    from tinsmith_trainer.engine import Snapshot, TrainingEngine

RETRY_PAUSE_S = 0.5
COMMIT_TIMEOUT_S = 10.0

R = TypeVar("R")

SaveOp = ops.SaveWeights | ops.SaveWeightsForSampler


class Executor:
    """Carries out ops. An error of an op is its result, never an exception here."""

    def __init__(
        self,
        engine: TrainingEngine,
        compute: Compute,
        bus: Bus,
        blobs: BlobStore,
        *,
        base_model: str,
        patience_s: float,
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._bus = bus
        self._blobs = blobs
        self._base_model = base_model
        self._patience_s = patience_s

    async def execute(self, op: ops.Op, log: BoundLogger) -> asyncio.Future[ops.OpResult]:
        """Change the model's state as ``op`` says.

        Returns as soon as the next op of the model may run; the result may come later (a
        save is written while training goes on).
        """
        try:
            if isinstance(op.body, SaveOp):
                snapshot = await self._run(op, self._engine.snapshot)
                return asyncio.create_task(
                    self._outcome(self._save(op, op.body, snapshot), log),
                    name=f"save {op.model_id}:{op.seq}",
                )
            return settled(await self._outcome(self._apply(op), log))
        except Exception as exc:  # noqa: BLE001 - see the class docstring
            return settled(_failure(exc, log))

    async def drop(self, model_id: str) -> None:
        """Forget the model's tensors."""
        await self._compute.run(model_id, lambda: self._engine.drop(model_id))

    async def restore(
        self, model_id: str, parts: Mapping[str, BlobRef], *, with_optimizer: bool
    ) -> ops.CreateModelDone:
        """Give the model the state that lies in ``parts``."""
        files = {name: await self._blobs.get(ref) for name, ref in parts.items()}
        return await self._compute.run(
            model_id,
            lambda: self._engine.restore(model_id, files, with_optimizer=with_optimizer),
        )

    async def _apply(self, op: ops.Op) -> ops.OpResult:
        model_id, body = op.model_id, op.body
        match body:
            case ops.CreateModel(checkpoint=None):
                return await self._run(op, lambda _: self._engine.create(model_id, body.lora))
            case ops.CreateModel():
                parts = await self._parts(str(body.checkpoint))
                done = await self.restore(model_id, parts, with_optimizer=body.with_optimizer)
                return ops.CreateModelDone(model_id=model_id, lora=done.lora, parts=parts)
            case ops.ForwardBackward():
                return await self._run(op, lambda _: self._engine.forward_backward(model_id, body))
            case ops.OptimStep():
                return await self._run(op, lambda _: self._engine.optim_step(model_id, body))
            case ops.LoadWeights():
                parts = await self._parts(body.path)
                await self.restore(model_id, parts, with_optimizer=body.with_optimizer)
                return ops.LoadWeightsDone(path=body.path, parts=parts)
            case ops.Refused():
                return body.reason
            case ops.SaveWeights() | ops.SaveWeightsForSampler():
                msg = "saves are carried out by execute()"
                raise TypeError(msg)
            case _:
                assert_never(body)

    async def _run(self, op: ops.Op, call: Callable[[str], R]) -> R:
        return await self._compute.run(
            op.model_id, lambda: call(op.model_id), cost=tokens_of(op.body)
        )

    async def _parts(self, path: str) -> dict[str, BlobRef]:
        return (await self._bus.call(table.GET_CHECKPOINT, GetCheckpoint(path=path))).parts

    async def _save(self, op: ops.Op, body: SaveOp, snapshot: Snapshot) -> ops.OpResult:
        is_training = isinstance(body, ops.SaveWeights)
        session = None
        if isinstance(body, ops.SaveWeightsForSampler):
            session = body.sampling_session_id
        files = await asyncio.to_thread(to_files, snapshot, with_optimizer=is_training)
        parts = {name: await self._blobs.put(data) for name, data in files.items()}
        request = CommitCheckpoint(
            model_id=op.model_id,
            kind="weights" if is_training else "ephemeral" if session else "sampler_weights",
            name=body.name or f"ephemeral-{op.seq}",
            op_seq=op.seq,
            base_model=self._base_model,
            lora=snapshot.lora,
            step=snapshot.step,
            parts=parts,
            overwrite=body.overwrite,
            ttl_s=body.ttl_s,
            user_metadata=body.user_metadata,
            sampling_session_id=session,
        )
        done = await self._commit(request)
        if is_training:
            return ops.SaveWeightsDone(path=done.path, size_bytes=done.size_bytes)
        return ops.SaveWeightsForSamplerDone(
            path=None if session else done.path,
            sampling_session_id=session,
            size_bytes=done.size_bytes,
        )

    async def _commit(self, request: CommitCheckpoint) -> CommitCheckpointDone:
        """Ask the checkpointer, again while it may be restarting: commits are idempotent."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            try:
                return await self._bus.call(
                    table.COMMIT_CHECKPOINT, request, timeout_s=COMMIT_TIMEOUT_S
                )
            except (NoResponder, BrokerUnavailable):
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _outcome(self, work: Awaitable[ops.OpResult], log: BoundLogger) -> ops.OpResult:
        try:
            return await work
        except Exception as exc:  # noqa: BLE001 - see the class docstring
            return _failure(exc, log)


def tokens_of(body: ops.OpBody) -> int:
    """What an op costs on the torch thread, in tokens."""
    if not isinstance(body, ops.ForwardBackward):
        return 0
    return sum(datum.tokens.shape[0] if datum.tokens.shape else 0 for datum in body.data)


def _failure(exc: Exception, log: BoundLogger) -> Failed:
    failed = to_failed(exc)
    if failed.category == "user":
        log.info("op failed", error=failed.message)
    else:
        log.error("op failed", error=failed.message, exc_info=exc)
    return failed


def settled(result: ops.OpResult) -> asyncio.Future[ops.OpResult]:
    """A result that is there already."""
    future: asyncio.Future[ops.OpResult] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future

"""What each kind of op does: to the engine's tensors, and to checkpoints."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, assert_never

from tinsmith.errors import BrokerUnavailable, NoResponder
from tinsmith.messages import ops, table
from tinsmith.messages.base import Failed
from tinsmith.messages.checkpoints import CommitCheckpoint, CommitCheckpointDone, GetCheckpoint
from tinsmith.messages.failures import to_failed
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from structlog.stdlib import BoundLogger

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import Bus
    from tinsmith.messages.base import BlobRef
    from tinsmith_trainer.compute import Compute
    from tinsmith_trainer.engine import Snapshot, TrainingEngine

RETRY_PAUSE_S = 0.5
COMMIT_TIMEOUT_S = 10.0

R = TypeVar("R")

SaveOp = ops.SaveWeights | ops.SaveWeightsForSampler
MutatingOp = ops.CreateModel | ops.OptimStep | ops.LoadWeights


@dataclass(frozen=True)
class Outcome:
    """What an op answers, and the digest of the model after it ("" if it changed nothing)."""

    result: asyncio.Future[ops.OpResult]
    state_blake3: asyncio.Future[str]

    @classmethod
    def of(cls, result: ops.OpResult) -> Outcome:
        """An outcome that is there already and changed nothing."""
        return cls(_settled(result), _settled(""))

    @property
    def is_step(self) -> bool:
        """Whether the optimizer has made a step."""
        return self.result.done() and isinstance(self.result.result(), ops.OptimStepDone)

    def cancel(self) -> None:
        """Nobody will ask for it any more."""
        self.result.cancel()
        self.state_blake3.cancel()


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
        self._digests: dict[str, asyncio.Future[str]] = {}  # of each model's present state

    async def execute(self, op: ops.Op, log: BoundLogger) -> Outcome:
        """Change the model's state as ``op`` says.

        Returns as soon as the next op of the model may run; the outcome may come later: a save
        is written, and a new state digested, while training goes on.
        """
        try:
            if isinstance(op.body, SaveOp):
                copying = self.copy(op.model_id)
                saving = self._outcome(self._save(op, op.body, copying), log)
                name = f"save {op.model_id}:{op.seq}"
                return Outcome(asyncio.create_task(saving, name=name), _settled(""))
            if not isinstance(op.body, MutatingOp):
                return Outcome.of(await self._outcome(self._apply(op), log))
            if is_change := self._is_change(op):
                await self._compute.readings.ended(op.model_id)
            result = await self._outcome(self._apply(op), log)
            if isinstance(result, Failed):
                return Outcome.of(result)
            if is_change:
                self._digests.pop(op.model_id, None)
            return Outcome(_settled(result), self._digest(op.model_id))
        except Exception as exc:  # noqa: BLE001 - see the class docstring
            return Outcome.of(_failure(exc, log))

    def copy(self, model_id: str) -> asyncio.Future[Snapshot]:
        """Begin to copy the model; its passes go on, and its next change waits for the copy."""
        return self._compute.readings.start(model_id, lambda: self._engine.snapshot(model_id))

    async def snapshot(self, model_id: str) -> Snapshot:
        """A copy of the model."""
        return await self.copy(model_id)

    async def store(self, snapshot: Snapshot) -> dict[str, BlobRef]:
        """Put a whole model into the blob store, from where ``restore`` brings it back."""
        return await self._put(await asyncio.to_thread(to_files, snapshot, with_optimizer=True))

    async def _put(self, files: Mapping[str, bytes]) -> dict[str, BlobRef]:
        return {name: await self._blobs.put(data) for name, data in files.items()}

    def _is_change(self, op: ops.Op) -> bool:
        """A step without a gradient changes nothing: no digest is taken, no reader waited for."""
        return not isinstance(op.body, ops.OptimStep) or self._engine.has_gradient(op.model_id)

    def _digest(self, model_id: str) -> asyncio.Future[str]:
        """The digest of the model's present state, which is perhaps still being made."""
        if model_id not in self._digests:
            view = self._engine.state(model_id)
            self._digests[model_id] = self._compute.readings.start(model_id, lambda: digest(view))
        return self._digests[model_id]

    async def drop(self, model_id: str) -> None:
        """Forget the model's tensors."""
        self._digests.pop(model_id, None)
        await self._compute.run(model_id, lambda: self._engine.drop(model_id))

    async def restore(
        self, model_id: str, parts: Mapping[str, BlobRef], *, with_optimizer: bool
    ) -> ops.CreateModelDone:
        """Give the model the state that lies in ``parts``."""
        files = {name: await self._blobs.get(ref) for name, ref in parts.items()}
        await self._compute.readings.ended(model_id)
        done = await self._compute.run(
            model_id,
            lambda: self._engine.restore(model_id, files, with_optimizer=with_optimizer),
        )
        self._digests.pop(model_id, None)
        return done

    async def state_blake3(self, model_id: str) -> str:
        """The digest of the model's present state."""
        return await self._digest(model_id)

    async def _apply(self, op: ops.Op) -> ops.OpResult:
        model_id, body = op.model_id, op.body
        match body:
            case ops.CreateModel(checkpoint=str(checkpoint)):
                parts = await self._parts(checkpoint)
                done = await self.restore(model_id, parts, with_optimizer=body.with_optimizer)
                return ops.CreateModelDone(model_id=model_id, lora=done.lora, parts=parts)
            case ops.ForwardBackward():
                return await self._compute.run_passes(model_id, self._engine.passes(model_id, body))
            case ops.CreateModel() | ops.OptimStep():
                return await self._compute.run(model_id, lambda: self._engine.apply(model_id, body))
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

    async def _parts(self, path: str) -> dict[str, BlobRef]:
        return (await self._bus.call(table.GET_CHECKPOINT, GetCheckpoint(path=path))).parts

    async def _save(
        self, op: ops.Op, body: SaveOp, copying: asyncio.Future[Snapshot]
    ) -> ops.OpResult:
        is_training = isinstance(body, ops.SaveWeights)
        session, is_inflight = None, False
        if isinstance(body, ops.SaveWeightsForSampler):
            session, is_inflight = body.sampling_session_id, body.is_inflight
        snapshot = await copying
        files = await asyncio.to_thread(to_files, snapshot, with_optimizer=is_training)
        parts = await self._put(files)
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
            is_inflight=is_inflight,
        )
        done = await self._commit(request)
        if is_training:
            return ops.SaveWeightsDone(path=done.path, size_bytes=done.size_bytes, parts=parts)
        return ops.SaveWeightsForSamplerDone(
            path=None if session else done.path,
            sampling_session_id=session,
            size_bytes=done.size_bytes,
            parts=parts,
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


def _failure(exc: Exception, log: BoundLogger) -> Failed:
    failed = to_failed(exc)
    if failed.category == "user":
        log.info("op failed", error=failed.message)
    else:
        log.error("op failed", error=failed.message, exc_info=exc)
    return failed


def _settled(value: R) -> asyncio.Future[R]:
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future

"""What each kind of op does: to the engine's tensors, and to checkpoints."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, assert_never

from tinsmith.errors import BrokerUnavailable, NoResponder
from tinsmith.messages import ops, table
from tinsmith.messages.base import Failed
from tinsmith.messages.checkpoints import GetCheckpoint
from tinsmith.messages.failures import to_failed
from tinsmith.parts import check_manifest, check_parts
from tinsmith.weights.change import raw
from tinsmith.weights.places import BlobChunks, in_order
from tinsmith.weights.sending import send
from tinsmith_trainer import saved_states, saves
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.parts import NEW
from tinsmith_trainer.state import digest
from tinsmith_trainer.training_files import state_file

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from structlog.stdlib import BoundLogger

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import Bus
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import CommitCheckpoint, CommitCheckpointDone
    from tinsmith.messages.weights import PublishedVersion
    from tinsmith_trainer.compute import Compute
    from tinsmith_trainer.engine import Snapshot, TrainingEngine
    from tinsmith_trainer.parts import Past
    from tinsmith_trainer.publishing import Publishing

RETRY_PAUSE_S = 0.5
COMMIT_TIMEOUT_S = 10.0

R = TypeVar("R")

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

    def __init__(  # noqa: PLR0913 - what it works with, and what checkpoints say of it
        self,
        engine: TrainingEngine,
        compute: Compute,
        bus: Bus,
        blobs: BlobStore,
        *,
        base_model: str,
        patience_s: float,
        base_blake3: str = "",
        publishing: Publishing | None = None,
    ) -> None:
        """With ``publishing``, what is saved for samplers is published on the model's lineage.

        ``base_model`` and ``base_blake3`` go into checkpoints.
        """
        self._engine = engine
        self._compute = compute
        self._bus = bus
        self._blobs = blobs
        self._base_model = base_model
        self._base_blake3 = base_blake3
        self._patience_s = patience_s
        self._publishing = publishing
        self._digests: dict[str, asyncio.Future[str]] = {}  # of each model's present state
        self._saved: dict[str, tuple[int, asyncio.Future[str]]] = {}  # by its last save: op, state

    async def execute(self, op: ops.Op, log: BoundLogger, past: Past = NEW) -> Outcome:
        """Change the model's state as ``op`` says; with the ``past`` of one that is repeated.

        Returns as soon as the next op of the model may run; the outcome may come later: a save
        is written, and a new state digested, while training goes on.
        """
        try:
            if isinstance(op.body, saves.SaveOp):
                # Nearly always there already: it was made when the state came to be.
                state_blake3 = self._digest(op.model_id)
                self._saved[op.model_id] = (op.seq, state_blake3)
                copying = self.copy(op.model_id)
                saving = self._outcome(self._save(op, op.body, copying, state_blake3), log)
                name = f"save {op.model_id}:{op.seq}"
                return Outcome(asyncio.create_task(saving, name=name), _settled(""))
            if not isinstance(op.body, MutatingOp):
                return Outcome.of(await self._outcome(self._apply(op, past), log))
            if is_change := self._is_change(op):
                await self._compute.readings.ended(op.model_id)
            result = await self._outcome(self._apply(op, past), log)
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
        """Put a whole model into the blob store, from where ``restore`` brings it back.

        ``snapshot`` is spent.
        """
        state = await asyncio.to_thread(saved_states.state_of, snapshot)
        chunks = BlobChunks(self._blobs, state.size_bytes)
        sent = await send(chunks, state.full(raw), state.specs)
        about = await self._blobs.put(state_file(snapshot, root=state.root))
        self._engine.spare.keep(snapshot)
        return saved_states.parts(about, sent)

    async def _files(self, snapshot: Snapshot, *, with_optimizer: bool) -> Mapping[str, bytes]:
        """The files of ``snapshot``, which is spent."""
        files = await asyncio.to_thread(to_files, snapshot, with_optimizer=with_optimizer)
        self._engine.spare.keep(snapshot)
        return files

    async def _put(self, files: Mapping[str, bytes]) -> dict[str, BlobRef]:
        """Write them one after the other: the next is perhaps made only when it is read."""
        return {
            name: await self._blobs.put(await asyncio.to_thread(files.__getitem__, name))
            for name in files
        }

    def _is_change(self, op: ops.Op) -> bool:
        """A step without a gradient changes nothing: no digest is taken, no reader waited for."""
        return not isinstance(op.body, ops.OptimStep) or self._engine.has_gradient(op.model_id)

    def _digest(self, model_id: str) -> asyncio.Future[str]:
        """The digest of the model's present state, which is perhaps still being made."""
        if model_id not in self._digests:
            view = self._engine.state(model_id)
            self._digests[model_id] = self._compute.readings.start(model_id, lambda: digest(view))
        return self._digests[model_id]

    def is_as_saved(self, model_id: str, op_seq: int | None) -> bool:
        """Whether that op was the model's last save, and nothing has changed it since."""
        seq, state = self._saved.get(model_id, (None, None))
        return op_seq is not None and seq == op_seq and self._digests.get(model_id) is state

    async def drop(self, model_id: str) -> None:
        """Forget the model's tensors."""
        self._digests.pop(model_id, None)
        self._saved.pop(model_id, None)
        if self._publishing is not None:
            self._publishing.forget(model_id)
        await self._compute.run(model_id, lambda: self._engine.drop(model_id))

    async def restore(
        self,
        model_id: str,
        parts: Mapping[str, BlobRef],
        *,
        with_optimizer: bool,
        optimizer: ops.OptimizerFamily = "adamw",
    ) -> ops.CreateModelDone:
        """Give the model the state that lies in ``parts``; see ``TrainingEngine.restore``.

        They are a checkpoint's, or those of a state that was saved for the next owner, which may
        be the files of a checkpoint as well: earlier versions wrote it so.
        """
        check_parts(parts)
        read = in_order(BlobChunks(self._blobs), list(parts.values()))
        async with aclosing(read) as contents:
            files = dict(zip(parts, [data async for data in contents], strict=True))
        await self._compute.readings.ended(model_id)
        done = await self._compute.run(
            model_id,
            lambda: self._engine.restore(
                model_id, files, with_optimizer=with_optimizer, optimizer=optimizer
            ),
        )
        self._digests.pop(model_id, None)
        return done

    async def state_blake3(self, model_id: str) -> str:
        """The digest of the model's present state."""
        return await self._digest(model_id)

    async def _apply(self, op: ops.Op, past: Past = NEW) -> ops.OpResult:
        model_id, body = op.model_id, op.body
        match body:
            case ops.CreateModel(checkpoint=str(checkpoint)):
                parts = await self._parts(checkpoint)
                done = await self.restore(
                    model_id,
                    parts,
                    with_optimizer=body.with_optimizer,
                    optimizer=body.optimizer,
                )
                return ops.CreateModelDone(model_id=model_id, lora=done.lora, parts=parts)
            case ops.ForwardBackward():
                passes = self._engine.passes(model_id, body, past)
                return await self._compute.run_passes(model_id, passes)
            case ops.CreateModel() | ops.OptimStep():
                return await self._compute.run(
                    model_id, lambda: self._engine.apply(model_id, body, past)
                )
            case ops.LoadWeights():
                parts = await self._parts(body.path)
                await self.restore(model_id, parts, with_optimizer=body.with_optimizer)
                return ops.LoadWeightsDone(path=body.path, parts=parts)
            case ops.Refused():
                return body.reason
            case ops.SaveWeights() | ops.SaveWeightsForSampler() | ops.SaveWeightsExternal():
                msg = "saves are carried out by execute()"
                raise TypeError(msg)
            case _:
                assert_never(body)

    async def _parts(self, path: str) -> dict[str, BlobRef]:
        found = await self._bus.call(table.GET_CHECKPOINT, GetCheckpoint(path=path))
        check_manifest(found)
        return found.parts

    async def _save(
        self,
        op: ops.Op,
        body: saves.SaveOp,
        copying: asyncio.Future[Snapshot],
        state_blake3: asyncio.Future[str],
    ) -> ops.OpResult:
        is_training = isinstance(body, ops.SaveWeights)
        published = await self._publish(op, copying)
        snapshot = await copying
        parts = await self._put(await self._files(snapshot, with_optimizer=is_training))
        origin = saves.Origin(
            self._base_model,
            self._base_blake3,
            self._engine.info.tokenizer_id,
            await asyncio.shield(state_blake3),  # others wait for it too
        )
        done = await self._commit(saves.request(op, body, snapshot, parts, origin, published))
        return saves.result(body, done, parts, published)

    async def _publish(
        self, op: ops.Op, copying: asyncio.Future[Snapshot]
    ) -> PublishedVersion | None:
        if self._publishing is None or not isinstance(op.body, ops.SaveWeightsForSampler):
            return None
        async with self._publishing.turn(op.model_id):
            return await self._publishing.publish(op.model_id, await copying)

    async def take_over(self, model_id: str) -> None:
        """Go on with the lineage that an earlier owner of the model has left, if it has.

        Raises:
            BrokerUnavailable: whether there is one is unknown.
            Fenced: the model has another owner again.
        """
        if self._publishing is not None and await self._publishing.has_lineage(model_id):
            await self._publishing.take_over(model_id, await self.snapshot(model_id))

    async def end_lineage(self, model_id: str) -> None:
        """Nothing more will be published of the model."""
        if self._publishing is not None:
            await self._publishing.end(model_id)

    async def _commit(self, request: CommitCheckpoint) -> CommitCheckpointDone:
        """Ask the checkpointer, again while it may be restarting: commits are idempotent."""
        working_s = saves.encryption_s(request)
        deadline = asyncio.get_running_loop().time() + self._patience_s + working_s
        while True:
            try:
                return await self._bus.call(
                    table.COMMIT_CHECKPOINT, request, timeout_s=COMMIT_TIMEOUT_S + working_s
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

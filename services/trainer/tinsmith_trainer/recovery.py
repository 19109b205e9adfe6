"""Brings a model to where its log ends: from its newest saved state, by repeating what followed.

Ops that failed changed nothing and are skipped, except steps that dropped a gradient that they
could not use; ops that only read the model are skipped too. Every repeated op must give the
result and the state that the log has for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.errors import BrokerUnavailable, ServerError
from tinsmith.logbook.differences import Comparison
from tinsmith.messages import ops
from tinsmith.messages.base import Failed
from tinsmith_trainer import canonical
from tinsmith_trainer.checkpoint_files import refs, to_files
from tinsmith_trainer.repeating import (
    between_states,
    drops_gradient,
    repeat,
    saves,
    why_not_repeated,
)
from tinsmith_trainer.snapshots import Unsaved

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from tinsmith.bus import CommitLog
    from tinsmith.logbook.differences import Difference
    from tinsmith.messages.base import BlobRef
    from tinsmith.sealing import Seal
    from tinsmith_trainer.executor import Executor
    from tinsmith_trainer.parts import Past


@dataclass(frozen=True)
class Recovered:
    """Where a model stands."""

    next_seq: int
    broken: Failed | None = None
    """Why every further op must fail: the model was never created, or cannot be rebuilt."""
    unsaved: Unsaved | None = None
    """Its state, if changes had to be repeated to come to it."""
    repeated: int = 0
    """How many."""


class Recovery:
    """The rebuilding of one model."""

    def __init__(
        self,
        model_id: str,
        log: CommitLog,
        seal: Seal,
        executor: Executor,
        logger: BoundLogger,
    ) -> None:
        self._model_id = model_id
        self._log = log
        self._seal = seal
        self._executor = executor
        self._machine = _Waited(executor, logger)
        self._logger = logger

    async def run(self) -> Recovered:
        """Rebuild the model, if its log has anything of it.

        A model that cannot be rebuilt is returned as broken: its clients are told at once, which
        beats waiting for a repair that needs an operator.

        Raises:
            Forgotten: there is nothing left of it to be repeated.
        """
        state = await self._from_saved_state()
        # From the op before it: the next one may be a gap that its session left.
        last = max(state.next_seq - 1, 0)
        async for entry in self._log.entries(self._model_id, from_op=last):
            if isinstance(entry, ops.Record) and entry.seq >= state.next_seq:
                broken = state.broken or await self._repeat(entry)
                state = _after(entry, state, broken)
        if state.broken is not None:
            reason = state.broken.message
            self._logger.error("model cannot be rebuilt from its log", reason=reason)
        elif state.next_seq:
            self._logger.info("model rebuilt from its log", next_seq=state.next_seq)
        return state

    async def give_up(self, reason: str) -> Recovered:
        """The model as one that cannot be served: every further op fails with ``reason``."""
        next_seq = 0
        async for entry in self._log.entries(self._model_id):
            if isinstance(entry, ops.Record):
                next_seq = max(next_seq, entry.seq + 1)
        return Recovered(next_seq, Failed(category="server", message=reason))

    async def _from_saved_state(self) -> Recovered:
        saved = await self._log.newest_state(self._model_id)
        if saved is None:
            return Recovered(0)
        try:
            await self._executor.restore(self._model_id, saved.parts, with_optimizer=True)
            await self._check_state(saved.state_blake3)
        except BrokerUnavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - the log has everything: slower, not worse
            self._logger.error(  # noqa: TRY400 - its reason is told, its place is here
                "saved state cannot be used; starting from the first op", error=str(exc)
            )
            await self._executor.drop(self._model_id)
            return Recovered(0)
        self._logger.info("state restored", seq=saved.seq)
        return Recovered(saved.seq + 1)

    async def _repeat(self, entry: ops.Record) -> Failed | None:
        """Carry out one committed op; the reason when it does not do again what it did."""
        result = await self._log.result(entry, self._seal)
        if isinstance(result, Failed) and not drops_gradient(result):
            return why_broken(result) if entry.seq == 0 else None
        op = await self._log.op(entry, self._seal)
        if why_not_repeated(op.body, result) or _only_reads(op.body):
            return None
        try:
            _check(Comparison().first(result, await repeat(self._machine, op, result)))
            if entry.state_blake3:
                await self._check_state(entry.state_blake3)
        except BrokerUnavailable:
            raise  # nothing is wrong with the model: its owner tries again
        except Exception as exc:  # noqa: BLE001 - becomes the reason
            reason = (
                f"this model's state was lost with its trainer and request {op.seq} could not be "
                f"repeated ({exc}); continue from a saved checkpoint"
            )
            return Failed(category="server", message=reason)
        return None

    async def _check_state(self, expected: str) -> None:
        _check(between_states(expected, await self._executor.state_blake3(self._model_id)))


@dataclass(frozen=True)
class _Waited:
    """The executor, each op waited for: nothing else of the model can run meanwhile."""

    executor: Executor
    logger: BoundLogger

    async def execute(self, op: ops.Op, past: Past) -> ops.OpResult:
        return await (await self.executor.execute(op, self.logger, past)).result

    async def restore(
        self,
        model_id: str,
        parts: dict[str, BlobRef],
        *,
        with_optimizer: bool,
        optimizer: ops.OptimizerFamily = "adamw",
    ) -> ops.CreateModelDone:
        return await self.executor.restore(
            model_id, parts, with_optimizer=with_optimizer, optimizer=optimizer
        )

    async def parts(self, model_id: str, *, with_optimizer: bool) -> dict[str, BlobRef]:
        snapshot = await self.executor.snapshot(model_id)
        return await asyncio.to_thread(
            lambda: refs(to_files(snapshot, with_optimizer=with_optimizer))
        )

    async def root(self, model_id: str) -> str:
        snapshot = await self.executor.snapshot(model_id)
        return await asyncio.to_thread(lambda: canonical.root(snapshot))


def _after(entry: ops.Record, state: Recovered, broken: Failed | None) -> Recovered:
    """Where the model stands that stood at ``state`` before ``entry`` was repeated."""
    unsaved, repeated = state.unsaved, state.repeated
    if entry.state_blake3 and entry.seq:  # its creation is repeated as quickly as a copy is read
        unsaved, repeated = Unsaved(entry.seq, entry.state_blake3), repeated + 1
    return Recovered(entry.seq + 1, broken, unsaved, repeated)


def _only_reads(body: ops.OpBody) -> bool:
    return saves(body) or (isinstance(body, ops.ForwardBackward) and body.forward_only)


def _check(difference: Difference | None) -> None:
    if difference is not None:
        raise ServerError(
            f"{difference}; was it computed with other software, threads or hardware?"
        )


def why_broken(created: ops.OpResult) -> Failed | None:
    """What the ops after a creation that ended as ``created`` are told; None if it went well."""
    if not isinstance(created, Failed):
        return None
    message = f"this model was not created: {created.message}"
    return Failed(category=created.category, message=message)

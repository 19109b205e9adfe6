"""Brings a model to where its log ends by carrying out its committed ops again.

Ops that failed changed nothing and are skipped, and so are those that only read the model.
Loads take the very parts that the record names, not what their path means today.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.errors import BrokerUnavailable, ServerError
from tinsmith.messages import ops
from tinsmith.messages.base import Failed

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from tinsmith.bus import CommitLog
    from tinsmith_trainer.executor import Executor


@dataclass(frozen=True)
class Recovered:
    """Where a model stands."""

    next_seq: int
    broken: str | None = None
    """Why every further op must fail: the model was never created, or cannot be rebuilt."""


async def recover(
    model_id: str, log: CommitLog, executor: Executor, logger: BoundLogger
) -> Recovered:
    """Re-execute the log of ``model_id``.

    A model that cannot be rebuilt is returned as broken: its clients are told at once, which
    beats waiting for a repair that needs an operator.
    """
    state = Recovered(0)
    async for entry in log.entries(model_id):
        if not isinstance(entry, ops.Record):
            continue
        broken = state.broken or await _again(entry, log, executor, logger)
        state = Recovered(entry.seq + 1, broken)
    if state.broken is not None:
        logger.error("model cannot be rebuilt from its log", reason=state.broken)
    elif state.next_seq:
        logger.info("model rebuilt from its log", next_seq=state.next_seq)
    return state


def why_broken(created: ops.OpResult) -> str | None:
    """What the ops after a creation that ended as ``created`` are told; None if it went well."""
    if isinstance(created, Failed):
        return f"this model was not created: {created.message}"
    return None


async def _again(
    entry: ops.Record, log: CommitLog, executor: Executor, logger: BoundLogger
) -> str | None:
    """Carry out one committed op; the reason when what had succeeded fails now."""
    result = await log.result(entry)
    if isinstance(result, Failed):
        return why_broken(result) if entry.seq == 0 else None
    op = await log.op(entry)
    try:
        await _redo(op, result, executor, logger)
    except BrokerUnavailable:
        raise  # nothing is wrong with the model: its owner tries again
    except Exception as exc:  # noqa: BLE001 - becomes the reason
        return (
            f"this model's state was lost with its trainer and request {op.seq} could not be "
            f"repeated ({exc}); continue from a saved checkpoint"
        )
    return None


async def _redo(op: ops.Op, result: ops.OpResult, executor: Executor, logger: BoundLogger) -> None:
    match op.body, result:
        case (
            ops.CreateModel(checkpoint=str(), with_optimizer=warm),
            ops.CreateModelDone(parts=parts),
        ) | (ops.LoadWeights(with_optimizer=warm), ops.LoadWeightsDone(parts=parts)):
            await executor.restore(op.model_id, parts, with_optimizer=warm)
        case ((ops.CreateModel() | ops.OptimStep() | ops.ForwardBackward(forward_only=False)), _):
            again = await (await executor.execute(op, logger))
            if isinstance(again, Failed):
                raise ServerError(again.message)
        case _:
            pass

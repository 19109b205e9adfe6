"""What is done again of an op that a log has, whoever does it: a new owner or a replay.

Loads take the very parts that the record names, not what their path means today. Saves only
read the model: done again, they must come to the parts that the record names. A failure is
repeated if the engine decided it from the op and the model alone; any other, such as a missing
checkpoint or an op that never came, left the model as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from tinsmith.errors import NoRoom, NotSupported, UnusableGradient, UserError
from tinsmith.logbook.differences import Difference
from tinsmith.messages import ops
from tinsmith.messages.base import Failed
from tinsmith.messages.failures import to_failed
from tinsmith_trainer.parts import Past

if TYPE_CHECKING:
    from tinsmith.messages.base import BlobRef

SAVES = "saves"
OTHER_FAILURES = "failures outside of the engine"

Saved = ops.SaveWeightsDone | ops.SaveWeightsForSamplerDone | ops.SaveWeightsExternalDone


class Machine(Protocol):
    """What carries out ops."""

    async def execute(self, op: ops.Op, past: Past) -> ops.OpResult:
        """Create, forward-backward or step; an error of the op is its result.

        ``past`` tells how its passes were made.
        """

    async def restore(
        self,
        model_id: str,
        parts: dict[str, BlobRef],
        *,
        with_optimizer: bool,
        optimizer: ops.OptimizerFamily = "adamw",
    ) -> ops.CreateModelDone:
        """Give the model the state in ``parts``; a UserError when they do not make one."""

    async def parts(self, model_id: str, *, with_optimizer: bool) -> dict[str, BlobRef]:
        """What a checkpoint of the model as it is would consist of."""

    async def root(self, model_id: str) -> str:
        """By which a lineage would know the model as it is; of one that is trained whole."""


def changes_state(body: ops.OpBody) -> bool:
    """Whether the record of such an op, if it went well, has the digest of a new state."""
    return isinstance(body, ops.CreateModel | ops.OptimStep | ops.LoadWeights)


def saves(body: ops.OpBody) -> bool:
    """Whether such an op writes what the model is somewhere."""
    return isinstance(body, ops.SaveWeights | ops.SaveWeightsForSampler | ops.SaveWeightsExternal)


def drops_gradient(failed: Failed) -> bool:
    """Whether the op that failed so has changed the model all the same."""
    return failed.code == UnusableGradient.__name__


def why_not_repeated(body: ops.OpBody, result: ops.OpResult) -> str | None:
    """Which kind of op this is, if of one that is not carried out again; None for all others."""
    match body, result:
        case (
            (ops.SaveWeights(), ops.SaveWeightsDone(parts=parts))
            | (ops.SaveWeightsForSampler(), ops.SaveWeightsForSamplerDone(parts=parts))
            | (ops.SaveWeightsExternal(), ops.SaveWeightsExternalDone(parts=parts))
        ) if not parts:  # fmt: skip # of versions that did not name them
            return SAVES
        case _, Failed() if not _is_of_engine(body, result):
            return OTHER_FAILURES
        case _:
            return None


def _is_of_engine(body: ops.OpBody, failed: Failed) -> bool:
    """Whether the op and the model alone decide that it fails, and not the machine.

    Failures that an owner made up have no ``code``: of ops that never came, or of lost models.
    """
    match body:
        case ops.LoadWeights():
            return False
        case _ if saves(body):
            return False
        case ops.CreateModel(checkpoint=str()):
            return False
        case ops.CreateModel() if failed.code == NotSupported.__name__:
            return False  # by the trainer's settings
        case _:
            return failed.category == "user" and failed.code not in {"", NoRoom.__name__}


async def repeat(machine: Machine, op: ops.Op, result: ops.OpResult) -> ops.OpResult:
    """Carry ``op`` out again, given the ``result`` it had; returns what it gives now.

    Only for ops for which ``why_not_repeated`` has no reason.
    """
    match op.body, result:
        case (
            ops.CreateModel(checkpoint=str(), with_optimizer=warm),
            ops.CreateModelDone(parts=parts),
        ) | (ops.LoadWeights(with_optimizer=warm), ops.LoadWeightsDone(parts=parts)):
            return await _restored(machine, op, parts, with_optimizer=warm)
        case (
            (ops.SaveWeights(), ops.SaveWeightsDone() as done)
            | (ops.SaveWeightsForSampler(), ops.SaveWeightsForSamplerDone() as done)
            | (ops.SaveWeightsExternal(), ops.SaveWeightsExternalDone() as done)
        ):  # fmt: skip
            return await _saved(machine, op, done)
        case ops.Refused(reason=reason), _:
            return reason
        case ((ops.CreateModel(checkpoint=None) | ops.ForwardBackward() | ops.OptimStep()), _):
            return await machine.execute(op, Past.of(result))
        case body, _:
            msg = f"a {type(body).__name__} is never answered so"
            return Failed(category="unknown", message=msg)


async def repeat_alone(machine: Machine, op: ops.Op, result: ops.OpResult) -> ops.OpResult:
    """As ``repeat``, but without the room that other models' rows took in its passes."""
    if not has_company(result):
        return await repeat(machine, op, result)
    found = await repeat(machine, op, msgspec.structs.replace(result, frames=()))
    if isinstance(found, ops.ForwardBackwardDone) and isinstance(result, ops.ForwardBackwardDone):
        return msgspec.structs.replace(found, frames=result.frames)
    return found


def has_company(result: ops.OpResult) -> bool:
    """Whether it comes from passes that had rows of other models."""
    return isinstance(result, ops.ForwardBackwardDone) and bool(result.frames)


async def _restored(
    machine: Machine, op: ops.Op, parts: dict[str, BlobRef], *, with_optimizer: bool
) -> ops.OpResult:
    try:
        done = await machine.restore(
            op.model_id,
            parts,
            with_optimizer=with_optimizer,
            optimizer=op.body.optimizer if isinstance(op.body, ops.CreateModel) else "adamw",
        )
    except UserError as exc:
        return to_failed(exc)
    if isinstance(op.body, ops.LoadWeights):
        return ops.LoadWeightsDone(path=op.body.path, parts=parts)
    return ops.CreateModelDone(model_id=op.model_id, lora=done.lora, parts=parts)


async def _saved(machine: Machine, op: ops.Op, result: Saved) -> ops.OpResult:
    """Where it was saved is not decided by the model, so that is taken over."""
    with_optimizer = isinstance(op.body, ops.SaveWeights)
    try:
        parts = await machine.parts(op.model_id, with_optimizer=with_optimizer)
    except UserError as exc:
        return to_failed(exc)
    if isinstance(result, ops.SaveWeightsExternalDone):  # perhaps encrypted after that
        return msgspec.structs.replace(result, parts=parts)
    size_bytes = sum(ref.size for ref in parts.values())
    found = msgspec.structs.replace(result, parts=parts, size_bytes=size_bytes)
    if isinstance(found, ops.SaveWeightsForSamplerDone) and found.published is not None:
        root = await machine.root(op.model_id)
        published = msgspec.structs.replace(found.published, root=root)
        return msgspec.structs.replace(found, published=published)
    return found


def between_states(expected: str, found: str) -> Difference | None:
    """The difference of two digests of a model's state."""
    return None if expected == found else Difference("state", expected or "(none)", found)

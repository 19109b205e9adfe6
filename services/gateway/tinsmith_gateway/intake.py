"""Takes training work in: into the registry, onto the queues, and answers with a promise.

Each step is idempotent, and a request that broke off half-way is completed by its repetition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tinsmith import ids
from tinsmith.errors import Gone, InvalidRequest
from tinsmith.messages import ops
from tinsmith.messages.table import OPS, PLACEMENTS
from tinsmith_gateway.sameness import check_same
from tinsmith_gateway.whereabouts import op_tokens

if TYPE_CHECKING:
    from tinsmith.messages.registry import Run
    from tinsmith_gateway.gateway import Gateway
    from tinsmith_gateway.wire.requests import Sequenced


async def create(gateway: Gateway, run: Run, body: ops.CreateModel) -> dict[str, str]:
    """A new model: its entry, its first op, and a place among the trainers."""
    model_id = run.model_id
    await gateway.unfinished.admit(run.owner, model_id, 0)
    if await gateway.registry.runs.get(ids.token(model_id)) is None:
        await gateway.seals.make(model_id)  # first: whoever sees the run must find its key
    stored = await gateway.registry.runs.table.create(ids.token(model_id), run)
    has_lora = body.checkpoint is None  # else it is the checkpoint's of this moment
    if (
        stored.base_model != run.base_model
        or (has_lora and stored.lora != run.lora)
        or stored.user_metadata != run.user_metadata
    ):
        raise InvalidRequest(
            f"model_seq_id: {model_id} exists already, with another base model, shape or "
            "user_metadata; use the next number"
        )
    await _enqueue(gateway, ops.Op(model_id=model_id, seq=0, body=body))
    await gateway.bus.enqueue(
        PLACEMENTS,
        ops.Placement(model_id=model_id, base_model=body.base_model),
        pool=ids.pool_token(body.base_model),
        model=ids.token(model_id),
    )
    return _promise(model_id, 0)


async def admit(gateway: Gateway, owner: str, place: Sequenced) -> Run:
    """The model that a training request is for.

    Raises:
        NotFound: no such model, or not of ``owner``.
        Gone: its session has ended, or it was unloaded.
        Busy: ``owner`` has too much that is not done.
    """
    structlog.contextvars.bind_contextvars(
        model_id=place.model_id,
        seq=place.seq_id,
        request_id=ids.future_id(place.model_id, place.seq_id),
    )
    run = await gateway.registry.run(owner, place.model_id)
    gateway.sessions.check_active(await gateway.registry.session(owner, run.session_id))
    if run.unloaded_ns is not None:
        raise Gone(
            f"model_id: {run.model_id} was unloaded; create a model, from a checkpoint of it if "
            "there is one"
        )
    await gateway.unfinished.admit(owner, place.model_id, place.seq_id)
    return run


async def submit(gateway: Gateway, place: Sequenced, body: ops.OpBody) -> dict[str, str]:
    """One op of an admitted request; never waits for those before it."""
    await _enqueue(gateway, ops.Op(model_id=place.model_id, seq=place.seq_id, body=body))
    return _promise(place.model_id, place.seq_id)


async def _enqueue(gateway: Gateway, op: ops.Op) -> None:
    """Queue ``op``, if it is not queued or done already; InvalidRequest if another one is.

    The looks come after the attempt: an op that is no longer queued is in the log by then, so
    that of two ops with one number the second is always seen.
    """
    tokens = op_tokens(op.model_id, op.seq)
    seal = await gateway.seals.of(op.model_id)
    while True:
        is_queued = await gateway.bus.enqueue(OPS, op, seal, **tokens)
        gateway.unfinished.arrived(ids.future_id(op.model_id, op.seq))
        if (record := await gateway.bus.log.get(op.model_id, op.seq)) is not None:
            return check_same(op, await gateway.bus.log.op(record, seal))
        if is_queued:
            return None
        if (first := await gateway.bus.queued_as(OPS, seal, **tokens)) is not None:
            return check_same(op, first)


def _promise(model_id: str, seq: int) -> dict[str, str]:
    return {"request_id": ids.future_id(model_id, seq), "model_id": model_id}

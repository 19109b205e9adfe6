"""Takes training work in: into the registry, onto the queues, and answers with a promise.

Each step is idempotent, and a request that broke off half-way is completed by its repetition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tinsmith import ids
from tinsmith.errors import InvalidRequest
from tinsmith.messages import ops
from tinsmith.messages.table import OPS, PLACEMENTS
from tinsmith_gateway.whereabouts import op_tokens

if TYPE_CHECKING:
    from tinsmith.messages.registry import Run
    from tinsmith_gateway.gateway import Gateway
    from tinsmith_gateway.wire.requests import Sequenced


async def create(gateway: Gateway, run: Run, body: ops.CreateModel) -> dict[str, str]:
    """A new model: its entry, its first op, and a place among the trainers."""
    model_id = run.model_id
    stored = await gateway.registry.runs.table.create(ids.token(model_id), run)
    if (stored.base_model, stored.lora) != (run.base_model, run.lora):
        raise InvalidRequest(
            f"model_seq_id: {model_id} exists already, with another base model or shape; "
            "use the next number"
        )
    await gateway.bus.enqueue(
        OPS, ops.Op(model_id=model_id, seq=0, body=body), **op_tokens(model_id, 0)
    )
    await gateway.bus.enqueue(
        PLACEMENTS,
        ops.Placement(model_id=model_id, base_model=body.base_model),
        pool=ids.pool_token(body.base_model),
        model=ids.token(model_id),
    )
    return _promise(model_id, 0)


async def admit(gateway: Gateway, owner: str, place: Sequenced) -> Run:
    """The model that a training request is for; NotFound, or Gone when its session has ended."""
    structlog.contextvars.bind_contextvars(model_id=place.model_id, seq=place.seq_id)
    run = await gateway.registry.run(owner, place.model_id)
    gateway.sessions.check_active(await gateway.registry.session(owner, run.session_id))
    return run


async def submit(gateway: Gateway, place: Sequenced, body: ops.OpBody) -> dict[str, str]:
    """One op of an admitted request; never waits for those before it."""
    op = ops.Op(model_id=place.model_id, seq=place.seq_id, body=body)
    await gateway.bus.enqueue(OPS, op, **op_tokens(place.model_id, place.seq_id))
    return _promise(place.model_id, place.seq_id)


def _promise(model_id: str, seq: int) -> dict[str, str]:
    return {"request_id": ids.future_id(model_id, seq), "model_id": model_id}

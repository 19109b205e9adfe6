"""Losses that clients send as data: from the request to the id, which is all that is answered.

The id holds the whole loss, and the promise's id holds that id: any gateway can answer a poll, and
there is nothing to keep.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinsmith import loss_graphs
from tinsmith.errors import InvalidRequest
from tinsmith_gateway.wire.requests import Body
from tinsmith_gateway.wire.results import json_payload

if TYPE_CHECKING:
    from tinsmith_gateway.wire.results import Payload

_FUTURE_RE = re.compile(rf"([^:]+):({loss_graphs.PREFIX}.*)")


class CreateCustomLoss(Body, frozen=True, kw_only=True):
    """A traced function of one datum."""

    session_id: str
    name: str
    inputs: list[loss_graphs.Input]
    graph: loss_graphs.Graph


def future_id(asked: CreateCustomLoss) -> str:
    """The ``request_id`` of this loss; InvalidRequest when it has what the trainer lacks."""
    if not asked.inputs or len(asked.inputs) > loss_graphs.MAX_INPUTS:
        raise InvalidRequest(
            f"inputs: there are {len(asked.inputs)}; a loss reads 1 to {loss_graphs.MAX_INPUTS}, "
            "logprobs first"
        )
    loss = loss_graphs.LossGraph(
        name=asked.name[: loss_graphs.MAX_NAME], inputs=asked.inputs, graph=asked.graph
    )
    return f"{asked.session_id}:{loss_graphs.loss_id(loss)}"


def session_and_loss(request_id: str) -> tuple[str, str] | None:
    """The session and the loss that a ``request_id`` is of, if it is of one."""
    match = _FUTURE_RE.fullmatch(request_id)
    return None if match is None else (match[1], match[2])


def created(loss_id: str) -> Payload:
    """The answer; InvalidRequest when the id was not made here."""
    loss_graphs.from_id(loss_id)
    return json_payload({"type": "create_custom_loss", "loss_id": loss_id})

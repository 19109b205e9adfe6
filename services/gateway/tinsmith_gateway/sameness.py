"""Whether an op that is asked for has been asked for before under its number. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from tinsmith.errors import InvalidRequest
from tinsmith.messages import ops
from tinsmith.messages.base import encode

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_same(asked: ops.Op, first: ops.Op) -> None:
    """InvalidRequest, naming what differs, unless ``asked`` is ``first`` sent again."""
    if digest(asked.body) == digest(first.body):
        return
    field = "seq_id" if asked.seq else "model_seq_id"
    raise InvalidRequest(
        f"{field}: request {asked.seq} of model {asked.model_id} was sent before, as "
        f"{_compared(asked.body, first.body)}; a request that is sent again must not change, and "
        "a new one takes the next number"
    )


def digest(body: ops.OpBody) -> str:
    """Equal for bodies that ask for the same, in hex."""
    if isinstance(body, ops.Refused) and body.asked_blake3:
        return body.asked_blake3
    return blake3(encode(_asked(body))).hexdigest()


def _asked(body: ops.OpBody) -> ops.OpBody:
    """``body`` without what a gateway or a client may fill in otherwise the next time."""
    match body:
        case ops.SaveWeightsForSampler(sampling_session_id=str()):
            # The client counts sampling sessions on when it repeats the request.
            return msgspec.structs.replace(body, sampling_session_id="")
        case ops.CreateModel(checkpoint=str()):
            own = "adamw" if body.with_optimizer else body.optimizer
            # The rest is the checkpoint's.
            return msgspec.structs.replace(body, lora=ops.LoraShape(), optimizer=own)
        case _:
            return body


def _compared(asked: ops.OpBody, first: ops.OpBody) -> str:
    kinds = tuple(type(body).__struct_config__.tag for body in (first, asked))
    if kinds[0] != kinds[1]:
        return f"{kinds[0]}, and is {kinds[1]} now"
    return f"{kinds[0]} with another {' and '.join(_differing(_asked(asked), _asked(first)))}"


def _differing(asked: ops.OpBody, first: ops.OpBody) -> Iterator[str]:
    for field in asked.__struct_fields__:
        if encode(getattr(asked, field)) != encode(getattr(first, field)):
            yield field

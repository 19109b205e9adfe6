"""``unload_model`` of clients before 0.30: the promise's id names the model, and is the answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinsmith_gateway.wire.results import json_payload

if TYPE_CHECKING:
    from tinsmith_gateway.wire.results import Payload

_FUTURE_RE = re.compile(r"(.+:train:[0-9]+):unload")


def future_id(model_id: str) -> str:
    """The ``request_id`` of a model's end."""
    return f"{model_id}:unload"


def model_of(request_id: str) -> str | None:
    """The model whose end a ``request_id`` is, if it is of one."""
    match = _FUTURE_RE.fullmatch(request_id)
    return None if match is None else match[1]


def unloaded(model_id: str) -> Payload:
    """The answer."""
    return json_payload({"type": "unload_model", "model_id": model_id})

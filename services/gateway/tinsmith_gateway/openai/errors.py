"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tinsmith.messages.failures import message_of
from tinsmith_gateway import responses
from tinsmith_gateway.wire.results import json_payload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from tinsmith.errors import TinsmithError

PREFIX = "/v1/"
_FIELD_RE = re.compile(r"([a-z_]+)(?:[.\[][\w.\[\]]*)?(?:, [a-z_.]+)*: ")
_NAMES = {"path": "model", "base_model": "model", "num_samples": "n"}
"""Fields of the sampling route, and what they are called here."""
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "rate_limit_exceeded",
}


def of_error(error: TinsmithError) -> web.Response:
    """``{"error": ...}`` with its status."""
    answer = responses.of_error(error)  # its headers hold here too
    answer.body = json_payload(body(answer.status, message_of(error))).body
    return answer


def detail(status: int, message: str, *, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error that is none of ours."""
    return responses.of_payload(json_payload(body(status, message)), status=status, headers=headers)


def body(status: int, message: str) -> dict[str, Any]:
    """The error; ``param`` is the field that the message begins with."""
    message = message.replace("sampling_params.", "")
    found = _FIELD_RE.match(message)
    param = _NAMES.get(found[1], found[0].rpartition(": ")[0]) if found and status < 500 else None
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if (status, param) == (404, "model") else _CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

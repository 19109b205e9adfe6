"""HTTP answers: JSON and protobuf bodies, and the status that each error stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from tinsmith import errors
from tinsmith.messages.failures import message_of
from tinsmith_gateway.bodies import UnsupportedBody
from tinsmith_gateway.tokens import InvalidToken
from tinsmith_gateway.wire import results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith_gateway.wire.results import Payload

_STATUS: dict[type[errors.TinsmithError], int] = {
    UnsupportedBody: 415,
    errors.InvalidRequest: 400,
    errors.NotSupported: 400,
    errors.Unauthorized: 401,
    errors.NotFound: 404,
    errors.Gone: 410,
    errors.TooLarge: 413,
    errors.UserError: 400,
    errors.Busy: 429,
    errors.BrokerUnavailable: 503,
    errors.NoResponder: 503,
    errors.StorageFull: 507,
}
_RETRY = {"Retry-After": "1"}
_EXCHANGE = {"WWW-Authenticate": 'Bearer error="invalid_token"'}


def status_of(error: errors.TinsmithError) -> int:
    """The HTTP status; 500 for what only the operator can do anything about."""
    return next((_STATUS[kind] for kind in type(error).mro() if kind in _STATUS), 500)


def of_error(error: errors.TinsmithError) -> web.Response:
    """``{"detail": ...}`` with its status, and a hint when the same request may be sent again."""
    status = status_of(error)
    headers = _RETRY if status in (429, 503) else None
    if isinstance(error, InvalidToken):
        headers = _EXCHANGE
    return detail(status, message_of(error), headers=headers)


def detail(status: int, message: str, *, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error; never with an empty body, which clients take for a fault of a proxy."""
    return of_payload(results.json_payload({"detail": message}), status=status, headers=headers)


def of_json(value: object, *, status: int = 200) -> web.Response:
    """``value`` as JSON."""
    return of_payload(results.json_payload(value), status=status)


def of_payload(
    payload: Payload, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A body that is ready."""
    return web.Response(
        body=payload.body, content_type=payload.content_type, status=status, headers=headers
    )

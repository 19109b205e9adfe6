"""What happens around every request: its id in the log, the owner behind its key, its errors."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from tinsmith.errors import TinsmithError
from tinsmith_gateway import responses
from tinsmith_gateway.gateway import GATEWAY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger(__name__)

OWNER = web.RequestKey("owner", str)
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/api/v1/healthz"})
"""Answered without a key: who watches over the process has none."""


DOWNLOADS = "/api/v1/downloads/"
"""What lies behind is opened by a signed link instead of a key."""


@web.middleware
async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request an id that its log lines and its answer carry."""
    trace_id = secrets.token_hex(8)
    # A connection's requests run in one task, hence in one context.
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(http_request=trace_id, path=request.path)
    response = await handler(request)
    response.headers["X-Request-Id"] = trace_id
    return response


@web.middleware
async def report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into a JSON answer; only our own tell what went wrong."""
    try:
        return await handler(request)
    except TinsmithError as error:
        level = logging.ERROR if responses.status_of(error) >= 500 else logging.INFO
        log.log(level, "request refused", error=str(error), kind=type(error).__name__)
        return responses.of_error(error)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        keep = {k: v for k, v in error.headers.items() if k == "Allow"}
        return responses.detail(error.status, message, headers=keep)
    except Exception:
        log.exception("request crashed")
        return responses.detail(500, crash_message())


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Finds the owner behind ``X-API-Key``; Unauthorized without a valid one."""
    if request.path not in OPEN_PATHS and not request.path.startswith(DOWNLOADS):
        request[OWNER] = request.app[GATEWAY].keys.owner(request.headers.get("X-API-Key"))
    return await handler(request)


def crash_message() -> str:
    """What a client is told of an error that nobody foresaw."""
    trace_id = structlog.contextvars.get_contextvars().get("http_request", "")
    return f"internal error; the gateway's log has the details under {trace_id}"


ALL = (trace, report_errors, authenticate)

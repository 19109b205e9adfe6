"""What happens around every request: its id in the log, the owner behind its key, its errors."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from tinsmith import tracing
from tinsmith.errors import TinsmithError
from tinsmith.messages.failures import message_of
from tinsmith.metrics import names as metrics
from tinsmith_gateway import responses, versions
from tinsmith_gateway.auth import Caller
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.openai import errors as openai_errors
from tinsmith_gateway.openness import is_local

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import Protocol

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

    class ErrorShape(Protocol):
        """How errors look to the clients of a route."""

        def of_error(self, error: TinsmithError) -> web.Response:
            """One of ours."""

        def detail(
            self, status: int, message: str, *, headers: Mapping[str, str] | None = None
        ) -> web.Response:
            """Any other."""


log = structlog.get_logger(__name__)

OWNER = web.RequestKey("owner", str)
CALLER = web.RequestKey("caller", Caller)
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/api/v1/healthz", "/"})
"""Answered without a key: who watches over the process has none, and the page asks for one."""

PAGE_FILES = "/dashboard/"
"""Before the names of the page's files, which hold no data."""


DOWNLOADS = "/api/v1/downloads/"
"""What lies behind is opened by a signed link instead of a key."""

OWN_KEY = "/api/v1/auth/apikey/me"

POLLS = "/api/v1/retrieve_future"
"""Asked again and again for each request: a trace of its own for each would tell nothing."""

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


@web.middleware
async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request an id that its log lines and its answer carry."""
    trace_id = secrets.token_hex(8)
    # A connection's requests run in one task, hence in one context.
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(http_request=trace_id, path=request.path)
    route = _route(request)
    parent = request.headers.get(tracing.HEADER, "")
    if request.path == POLLS and not parent:
        response = await _measured(request, handler, route)
    else:
        with tracing.span(f"{request.method} {route}", parent=parent, http_request=trace_id):
            response = await _measured(request, handler, route)
            if response.status < 400:  # what is refused has its line
                log.debug("request answered", status=response.status)
    response.headers["X-Request-Id"] = trace_id
    return response


async def _measured(request: web.Request, handler: Handler, route: str) -> web.StreamResponse:
    method = request.method if request.method in _METHODS else "other"
    status = "gone"  # the client, before it had an answer
    with metrics.HTTP_OPEN.track_inprogress(), metrics.HTTP_SECONDS.labels(route).time():
        try:
            response = await handler(request)
            status = str(response.status)
        finally:
            metrics.HTTP_REQUESTS.labels(method, route, status).inc()
    return response


def _route(request: web.Request) -> str:
    """The route's own path, with names in place of ids; one word for all that there are none of."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


@web.middleware
async def report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into a JSON answer; only our own tell what went wrong."""
    shape: ErrorShape = responses
    if request.path.startswith(openai_errors.PREFIX):
        shape = openai_errors
    try:
        return await handler(request)
    except TinsmithError as error:
        level = logging.ERROR if responses.status_of(error) >= 500 else logging.INFO
        log.log(level, "request refused", error=message_of(error), kind=type(error).__name__)
        return shape.of_error(error)
    except web.HTTPException as error:
        message = f"{request.method} {request.path[:200]!r}: {error.reason}"
        keep = {k: v for k, v in error.headers.items() if k == "Allow"}
        return shape.detail(error.status, message, headers=keep)
    except Exception:
        log.exception("request crashed")
        return shape.detail(500, crash_message())


@web.middleware
async def check_client(request: web.Request, handler: Handler) -> web.StreamResponse:
    """NotSupported for a client of a version that this server does not serve."""
    versions.check_client(request.path, request.headers)
    return await handler(request)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Finds who is behind the key that is presented; Unauthorized without a valid one."""
    if request.path in OPEN_PATHS or request.path.startswith((DOWNLOADS, PAGE_FILES)):
        return await handler(request)
    keys = request.app[GATEWAY].keys
    caller = keys.caller(
        _presented(request),
        is_local=is_local(request.host, request.headers.get("Origin")),
    )
    request[CALLER], request[OWNER] = caller, caller.owner
    answer = await handler(request)
    # Who revokes a key is told that it was done; an answer that has begun cannot change.
    if request.path != OWN_KEY and not answer.prepared:
        keys.check_not_revoked(caller)
    return answer


def _presented(request: web.Request) -> str | None:
    """The key in ``X-API-Key``, as the tinker client sends it, or as a bearer's."""
    if (key := request.headers.get("X-API-Key")) is not None:
        return key
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def crash_message() -> str:
    """What a client is told of an error that nobody foresaw."""
    trace_id = structlog.contextvars.get_contextvars().get("http_request", "")
    return f"internal error; the gateway's log has the details under {trace_id}"


ALL = (trace, report_errors, check_client, authenticate)

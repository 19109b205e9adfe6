"""The parts of the protocol that this server does not have: refused at once, by name."""

from __future__ import annotations

from typing import NoReturn

from aiohttp import web

from tinsmith.errors import NotSupported

_CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
_PATHS = (
    ("POST", "/api/v1/auth/token"),
    ("GET", "/api/v1/auth/apikey/me"),
    ("DELETE", "/api/v1/auth/apikey/me"),
    ("POST", "/api/v1/retrieve_futures"),
    ("POST", "/api/v1/cancel_future"),
    ("POST", "/api/v1/create_custom_loss"),
    ("POST", "/api/v1/join_sampling_session"),
    ("POST", "/api/v1/copy_weights"),
    ("DELETE", _CHECKPOINT),
    ("POST", f"{_CHECKPOINT}/publish"),
    ("DELETE", f"{_CHECKPOINT}/publish"),
    ("PUT", f"{_CHECKPOINT}/ttl"),
    ("GET", f"{_CHECKPOINT}/external_weights_urls"),
    ("GET", f"{_CHECKPOINT}/archive"),
    ("POST", "/api/v1/sessions/search"),
    ("PUT", "/api/v1/sessions/{session_id}/project"),
    ("GET", "/api/v1/sessions/{session_id}/trace_export"),
    ("GET", "/api/v1/audit"),
    ("GET", "/api/v1/billing/usage/events"),
    ("GET", "/api/v1/billing/usage/checkpoints/current"),
    # Of clients before 0.30.
    ("POST", "/api/v1/forward"),
    ("POST", "/api/v1/unload_model"),
)


async def refuse(request: web.Request) -> NoReturn:
    """NotSupported, whatever was asked."""
    raise NotSupported(f"{request.method} {request.path} is not supported by this server yet")


ROUTES = tuple(web.route(method, path, refuse) for method, path in _PATHS)

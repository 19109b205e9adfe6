"""The parts of the protocol that this server does not have: refused at once, by name."""

from __future__ import annotations

from typing import NoReturn

from aiohttp import web

from tinsmith.errors import NotSupported

_CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
_PATHS = (
    ("GET", f"{_CHECKPOINT}/external_weights_urls"),
    # Of clients before 0.30.
    ("POST", "/api/v1/forward"),
    ("POST", "/api/v1/unload_model"),
)


async def refuse(request: web.Request) -> NoReturn:
    """NotSupported, whatever was asked."""
    raise NotSupported(f"{request.method} {request.path} is not supported by this server yet")


ROUTES = tuple(web.route(method, path, refuse) for method, path in _PATHS)

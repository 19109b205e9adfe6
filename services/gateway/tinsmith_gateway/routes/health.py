"""Whether the process is up, and whether it can do its work; no key is needed."""

from __future__ import annotations

from aiohttp import web

from tinsmith_gateway import responses
from tinsmith_gateway.gateway import GATEWAY


async def healthz(_request: web.Request) -> web.Response:
    """The process answers."""
    return responses.of_json({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """The broker can be reached as well."""
    if request.app[GATEWAY].bus.is_connected:
        return responses.of_json({"status": "ok"})
    return responses.detail(503, "the message broker cannot be reached; is NATS running?")


ROUTES = (
    web.get("/healthz", healthz),
    web.get("/readyz", readyz),
    web.get("/api/v1/healthz", healthz),
)

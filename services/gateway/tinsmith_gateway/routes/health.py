"""Whether the process is up, and whether it can do its work; no key is needed."""

from __future__ import annotations

from aiohttp import web

from tinsmith_gateway import responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.readiness import is_degraded, readiness


async def healthz(_request: web.Request) -> web.Response:
    """The process answers."""
    return responses.of_json({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """It can do its work; with ``?without=workers``, once there is a trainer and a sampler.

    Anybody may ask, so that it names no models; the process's own listener does.
    """
    needs_workers = request.query.get("without") != "workers"
    found = readiness(request.app[GATEWAY], needs_workers=needs_workers)
    if found.missing:
        return responses.detail(found.status, "; ".join(found.missing))
    status = "degraded" if needs_workers and is_degraded(found) else "ok"
    return responses.of_json({"status": status})


ROUTES = (
    web.get("/healthz", healthz),
    web.get("/readyz", readyz),
    web.get("/api/v1/healthz", healthz),
)

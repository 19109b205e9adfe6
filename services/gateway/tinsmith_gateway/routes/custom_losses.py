"""Losses that clients define; trainers carry them out."""

from __future__ import annotations

from aiohttp import web

from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import custom_losses


async def create_custom_loss(request: web.Request) -> web.Response:
    """Checks a loss and gives it an id."""
    gateway = request.app[GATEWAY]
    asked = await bodies.read_json(request, custom_losses.CreateCustomLoss)
    session = await gateway.registry.session(request[OWNER], asked.session_id)
    gateway.sessions.check_active(session)
    return responses.of_json({"request_id": custom_losses.future_id(asked)})


ROUTES = (web.post("/api/v1/create_custom_loss", create_custom_loss),)

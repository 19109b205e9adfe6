"""The end of one model, which clients before 0.30 can ask for; later ones end the session."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import structs

from tinsmith import ids
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import requests, unloading

if TYPE_CHECKING:
    from tinsmith.messages.registry import Run


async def unload_model(request: web.Request) -> web.Response:
    """No request is taken for the model any more; its trainer lets go of it."""
    registry = request.app[GATEWAY].registry
    asked = await bodies.read_json(request, requests.ModelRef)
    run = await registry.run(request[OWNER], asked.model_id)
    key = ids.token(run.model_id)
    registry.runs.apply(key, await registry.runs.table.update(key, _unloaded))
    promise = {"request_id": unloading.future_id(run.model_id), "model_id": run.model_id}
    return responses.of_json(promise)


def _unloaded(run: Run | None) -> Run | None:
    return run and structs.replace(run, unloaded_ns=run.unloaded_ns or time.time_ns())


ROUTES = (web.post("/api/v1/unload_model", unload_model),)

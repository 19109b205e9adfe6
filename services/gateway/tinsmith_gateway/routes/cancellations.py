"""Samples that nobody waits for any more."""

from __future__ import annotations

from aiohttp import web

from tinsmith import ids
from tinsmith.errors import InvalidRequest
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.cancelling import cancel_sample
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import requests


async def cancel_future(request: web.Request) -> web.Response:
    """Ends a sample that is not done; one that is done, or was never asked for, stays as it is."""
    gateway = request.app[GATEWAY]
    asked = await bodies.read_json(request, requests.FutureRef)
    future = ids.parse_future_id(asked.request_id)
    if future.kind != "sample":
        raise InvalidRequest(
            f"request_id: {asked.request_id} is training, which takes its turn and cannot be "
            "cancelled; only sampling can"
        )
    sampler = await gateway.registry.sampler(request[OWNER], future.target)
    base_model = gateway.models.resolve_sampled(sampler.base_model)
    await cancel_sample(
        gateway.bus, base_model, sampler.sampler_id, future.seq, owner=sampler.owner
    )
    return responses.of_json({})


ROUTES = (web.post("/api/v1/cancel_future", cancel_future),)

"""Samples that nobody waits for any more."""

from __future__ import annotations

from aiohttp import web

from tinsmith import ids
from tinsmith.errors import InvalidRequest
from tinsmith.messages.base import Failed
from tinsmith.messages.sampling import SampleFailed
from tinsmith.messages.services import SampleCancelled, SampleReady
from tinsmith.messages.table import SAMPLE_CANCELLED, SAMPLE_READY, SAMPLES
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.whereabouts import sample_tokens
from tinsmith_gateway.wire import requests

_CANCELLED = Failed(category="user", message="cancelled by its client")


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
    base_model = gateway.models.resolve(sampler.base_model)
    tokens = sample_tokens(base_model, sampler.sampler_id, future.seq)
    if await gateway.bus.is_queued(SAMPLES, **tokens):
        result = SampleFailed(request_id=asked.request_id, failure=_CANCELLED)
        # First: whoever takes the request up again finds it answered.
        await gateway.bus.results.put_first(sampler.sampler_id, future.seq, result)
        await gateway.bus.withdraw(SAMPLES, **tokens)
        await gateway.bus.emit(SAMPLE_CANCELLED, SampleCancelled(request_id=asked.request_id))
        await gateway.bus.emit(SAMPLE_READY, SampleReady(request_id=asked.request_id))
    return responses.of_json({})


ROUTES = (web.post("/api/v1/cancel_future", cancel_future),)

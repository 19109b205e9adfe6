"""Copies of a client that share its sampling session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import structs

from tinsmith import ids
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import requests

if TYPE_CHECKING:
    from tinsmith.messages.registry import Sampler


async def join_sampling_session(request: web.Request) -> web.Response:
    """A number that no other copy has; the original has 0."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    asked = await bodies.read_json(request, requests.SamplerRef)
    sampler = await gateway.registry.sampler(owner, asked.sampling_session_id)
    gateway.sessions.check_active(await gateway.registry.session(owner, sampler.session_id))
    joined = await gateway.registry.samplers.table.update(
        ids.token(sampler.sampler_id), lambda entry: _joined(entry or sampler)
    )
    number = (joined or sampler).clones
    return responses.of_json({"type": "join_sampling_session", "client_counter": number})


def _joined(sampler: Sampler) -> Sampler:
    return structs.replace(sampler, clones=sampler.clones + 1)


ROUTES = (web.post("/api/v1/join_sampling_session", join_sampling_session),)

"""Sampling sessions, and sampling from them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from tinsmith import ids
from tinsmith.adapters import adapter_ref
from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith.messages.registry import Sampler
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY, Gateway
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.sampling import Limits, Target, sample

if TYPE_CHECKING:
    from tinsmith.messages.sampling import AdapterRef


async def create_sampling_session(request: web.Request) -> web.Response:
    """A sampling session on a base model, or on weights saved for sampling."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    asked = await bodies.read_json(request, requests.CreateSamplingSession)
    session = await gateway.registry.session(owner, asked.session_id)
    gateway.sessions.check_active(session)
    base_model, adapter = await _source(gateway, owner, asked)
    gateway.routing.check(session, gateway.models.require(base_model, "sampler").name)
    sampler_id = ids.sampler_id(asked.session_id, asked.sampling_session_seq_id)
    wanted = Sampler(
        sampler_id=sampler_id,
        session_id=asked.session_id,
        owner=owner,
        created_ns=time.time_ns(),
        base_model=base_model,
        model_path=asked.model_path,
        adapter=adapter,
    )
    stored = await gateway.registry.samplers.table.create(ids.token(sampler_id), wanted)
    if (stored.base_model, stored.model_path) != (base_model, asked.model_path):
        raise InvalidRequest(
            f"sampling_session_seq_id: {sampler_id} exists already, with another model; "
            "use the next number"
        )
    return responses.of_json({"type": "create_sampling_session", "sampling_session_id": sampler_id})


async def asample(request: web.Request) -> web.Response:
    """Continuations of a prompt, its log-probabilities, or both.

    429 when the queue is full, or its owner has too much in it.
    """
    gateway, owner = request.app[GATEWAY], request[OWNER]
    asked = await bodies.read_json(request, requests.Sample)
    if asked.sampling_session_id is None:
        raise NotSupported(
            "sampling_session_id: missing; sampling without a session is not supported, "
            "create one with create_sampling_session"
        )
    structlog.contextvars.bind_contextvars(sampler_id=asked.sampling_session_id, seq=asked.seq_id)
    sampler = await gateway.registry.sampler(owner, asked.sampling_session_id)
    gateway.sessions.check_active(await gateway.registry.session(owner, sampler.session_id))
    target = _target(gateway, sampler, asked.seq_id)
    structlog.contextvars.bind_contextvars(request_id=target.request_id)
    message = sample(asked, target, _limits(gateway, target.base_model))
    await gateway.holding.send(owner, message)
    sequences = [f"{target.request_id}:{index}" for index in range(asked.num_samples)]
    return responses.of_json({"request_id": target.request_id, "sample_sequence_ids": sequences})


async def _source(
    gateway: Gateway, owner: str, asked: requests.CreateSamplingSession
) -> tuple[str, AdapterRef | None]:
    """The base model, and the adapter on it if any."""
    if asked.model_path is None:
        if asked.base_model is None:
            raise InvalidRequest("base_model, model_path: both are missing; give one")
        return asked.base_model, None
    checkpoint = await gateway.registry.checkpoint_of_kind(
        owner, asked.model_path, "sampler_weights", "sampling"
    )
    resolve = gateway.models.resolve
    if asked.base_model and resolve(asked.base_model) != resolve(checkpoint.base_model):
        raise InvalidRequest(
            f"base_model: {asked.base_model!r} is not that of model_path, which is "
            f"{checkpoint.base_model!r}; leave base_model out"
        )
    return asked.base_model or checkpoint.base_model, adapter_ref(checkpoint)


def _target(gateway: Gateway, sampler: Sampler, seq: int) -> Target:
    return Target(
        request_id=ids.future_id(sampler.sampler_id, seq),
        sampler_id=sampler.sampler_id,
        base_model=gateway.models.resolve_sampled(sampler.base_model),
        adapter=sampler.adapter,
    )


def _limits(gateway: Gateway, base_model: str) -> Limits:
    served = gateway.models.get(base_model, "sampler")
    return Limits(
        max_samples=gateway.config.max_samples,
        max_topk=gateway.config.max_topk_logprobs,
        max_tokens=gateway.config.max_request_tokens,
        vocab_size=served.vocab_size if served else None,
        context_length=served.context_length if served else None,
    )


ROUTES = (
    web.post("/api/v1/create_sampling_session", create_sampling_session),
    web.post("/api/v1/asample", asample),
)

"""Models and their sequenced operations.

A sequenced request is refused with an HTTP error only when it cannot be attributed, or its
session is over. Anything else that is wrong with it becomes an op that takes its place and
fails its future: the client counts on, and a place that nobody takes would stop all that follow.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from tinsmith import ids, whole
from tinsmith.errors import InvalidRequest, UserError
from tinsmith.messages import ops
from tinsmith.messages.registry import Run
from tinsmith_gateway import bodies, intake, responses
from tinsmith_gateway.auth import token_owner
from tinsmith_gateway.gateway import GATEWAY, Gateway
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.sameness import digest
from tinsmith_gateway.wire import forward_backward as passes
from tinsmith_gateway.wire import json_training, requests, training
from tinsmith_gateway.wire.labels import check_metadata
from tinsmith_gateway.wire.results import JSON, PROTOBUF

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tinsmith.messages.registry import Session
    from tinsmith_gateway.wire.requests import Sequenced

    Reader = Callable[[bytes, passes.Bounds], tuple[Sequenced, ops.OpBody]]


async def create_model(request: web.Request) -> web.Response:
    """A fresh adapter on a base model, or the base model itself to be trained whole."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    asked = await bodies.read_json(request, requests.CreateModel)
    session = await gateway.registry.session(owner, asked.session_id)
    gateway.sessions.check_active(session)
    served = gateway.models.require(asked.base_model, "trainer")
    optimizer = training.optimizer(asked.optimizer_config)
    model_id = ids.model_id(asked.session_id, asked.model_seq_id)
    if whole.is_whole(served.name):
        lora = training.whole_shape(asked.lora_config)
    else:
        lora = training.lora_shape(asked.lora_config, max_rank=served.max_rank, model_id=model_id)
    run = _run(session, asked, base_model=asked.base_model, lora=lora, optimizer=optimizer)
    body = ops.CreateModel(base_model=served.name, lora=lora, optimizer=optimizer)
    return responses.of_json(await intake.create(gateway, run, body))


async def load_weights(request: web.Request) -> web.Response:
    """A new model from a checkpoint, or a checkpoint into a model, by what the body names."""
    raw = await bodies.read(request, JSON)
    target = requests.decode(raw, requests.LoadTarget)
    if target.model_id is not None:
        return await _load_into(request, raw)
    return await _create_from_checkpoint(request, raw)


async def forward_backward(request: web.Request) -> web.Response:
    """Scores datums and, unless it is forward only, adds to the gradient."""
    return await _pass(request, {PROTOBUF: passes.from_proto, JSON: passes.from_json})


async def forward(request: web.Request) -> web.Response:
    """Scores datums, for clients before 0.25."""
    return await _pass(request, {JSON: partial(passes.from_json, forward_only=True)})


async def optim_step(request: web.Request) -> web.Response:
    """One optimizer step."""
    raw = await bodies.read(request, JSON)
    place = training.sequenced(raw)
    return await _submit(request, place, training.lazily(lambda: training.optim_step(raw)))


async def save_weights(request: web.Request) -> web.Response:
    """A training checkpoint."""
    raw = await bodies.read(request, JSON)
    place = training.sequenced(raw)
    return await _submit(request, place, training.lazily(lambda: training.save_weights(raw)))


async def save_weights_for_sampler(request: web.Request) -> web.Response:
    """Weights to sample from, by name or as a sampling session."""
    raw = await bodies.read(request, JSON)
    place = training.sequenced(raw)
    session_id = ids.session_of(place.model_id)
    body = training.lazily(lambda: training.save_weights_for_sampler(raw, session_id))
    return await _submit(request, place, body)


async def save_weights_external(request: web.Request) -> web.Response:
    """Weights to download, in the form of other tools."""
    raw = await bodies.read(request, JSON)
    place = training.sequenced(raw)
    body = training.lazily(lambda: training.save_weights_external(raw))
    return await _submit(request, place, body)


async def _pass(request: web.Request, readers: Mapping[str, Reader]) -> web.Response:
    config = request.app[GATEWAY].config
    try:
        raw = await bodies.read(request, *readers)
    except bodies.BodyTooLarge as error:
        claimed = passes.place_in(error.prefix)
        claimed = claimed or json_training.place_in(await bodies.end_of(request, error))
        if claimed is None:
            raise
        return await _submit(request, claimed, training.refused(error))
    bounds = passes.Bounds(config.max_inflated_bytes, config.max_datums, config.max_request_tokens)
    reader = readers[request.content_type]
    if len(raw) < bodies.THREAD_BYTES:
        place, body = reader(raw, bounds)
    else:
        place, body = await asyncio.to_thread(reader, raw, bounds)
    return await _submit(request, place, body)


async def _submit(request: web.Request, place: Sequenced, body: ops.OpBody) -> web.Response:
    gateway = request.app[GATEWAY]
    await intake.admit(gateway, request[OWNER], place)
    return responses.of_json(await intake.submit(gateway, place, body))


async def _load_into(request: web.Request, raw: bytes) -> web.Response:
    gateway, owner = request.app[GATEWAY], request[OWNER]
    place = training.sequenced(raw)
    run = await intake.admit(gateway, owner, place)
    body = await _checked_load(gateway, run, raw)
    return responses.of_json(await intake.submit(gateway, place, body))


async def _checked_load(gateway: Gateway, run: Run, raw: bytes) -> ops.OpBody:
    try:
        body = training.load_weights(raw)
        token = requests.decode(raw, requests.LoadWeights).weights_access_token
    except UserError as error:
        return training.refused(error)
    try:
        checkpoint = await gateway.registry.checkpoint_of_kind(
            run.owner,
            body.path,
            "weights",
            "load_state",
            token_owner=token_owner(gateway.keys, token),
        )
        _check_base_model(gateway, checkpoint.base_model, run.base_model)
    except UserError as error:
        # It may be sent again when there is such a checkpoint, or no longer.
        return training.refused(error, asked_blake3=digest(body))
    return body


async def _create_from_checkpoint(request: web.Request, raw: bytes) -> web.Response:
    gateway, owner = request.app[GATEWAY], request[OWNER]
    asked = requests.decode(raw, requests.CreateFromCheckpoint)
    session = await gateway.registry.session(owner, asked.session_id)
    gateway.sessions.check_active(session)
    optimizer = training.optimizer(asked.optimizer_config)
    checkpoint = await gateway.registry.checkpoint_of_kind(
        owner,
        asked.path,
        "weights",
        "create_training_client_from_state",
        token_owner=token_owner(gateway.keys, asked.weights_access_token),
    )
    base_model = asked.base_model or checkpoint.base_model
    _check_base_model(gateway, checkpoint.base_model, base_model)
    served = gateway.models.require(base_model, "trainer")
    if asked.optimizer:
        _check_optimizer(asked.optimizer_config, checkpoint.optimizer)
        optimizer = checkpoint.optimizer
    run = _run(session, asked, base_model=base_model, lora=checkpoint.lora, optimizer=optimizer)
    body = ops.CreateModel(
        base_model=served.name,
        lora=checkpoint.lora,
        checkpoint=asked.path,
        with_optimizer=asked.optimizer,
        optimizer=optimizer,
    )
    return responses.of_json(await intake.create(gateway, run, body))


def _check_base_model(gateway: Gateway, saved: str, wanted: str) -> None:
    if gateway.models.resolve(saved) != gateway.models.resolve(wanted):
        raise InvalidRequest(
            f"path: the checkpoint is of base model {saved!r}, which cannot be loaded into "
            f"{wanted!r}; create a model of {saved!r} for it"
        )


def _check_optimizer(asked: requests.OptimizerConfig | None, saved: ops.OptimizerFamily) -> None:
    if asked is not None and asked.type != saved:
        raise InvalidRequest(
            f"optimizer_config.type: {asked.type[:80]!r}, but the optimizer's state in the "
            f"checkpoint is of {saved!r}; leave it out, or load without the optimizer"
        )


def _run(
    session: Session,
    asked: requests.CreateModel | requests.CreateFromCheckpoint,
    *,
    base_model: str,
    lora: ops.LoraShape,
    optimizer: ops.OptimizerFamily,
) -> Run:
    return Run(
        model_id=ids.model_id(asked.session_id, asked.model_seq_id),
        session_id=asked.session_id,
        owner=session.owner,
        created_ns=time.time_ns(),
        base_model=base_model,
        lora=lora,
        optimizer=optimizer,
        user_metadata=dict(check_metadata(asked.user_metadata or {})),
        project_id=session.project_id,
    )


ROUTES = (
    web.post("/api/v1/create_model", create_model),
    web.post("/api/v1/load_weights", load_weights),
    web.post("/api/v1/forward_backward", forward_backward),
    web.post("/api/v1/forward", forward),
    web.post("/api/v1/optim_step", optim_step),
    web.post("/api/v1/save_weights", save_weights),
    web.post("/api/v1/save_weights_for_sampler", save_weights_for_sampler),
    web.post("/api/v1/save_weights_external", save_weights_external),
)

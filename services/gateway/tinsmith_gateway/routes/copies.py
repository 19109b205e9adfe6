"""Copies of checkpoints: under a run of their own, in a project or in a session's slot."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING

from aiohttp import web
from blake3 import blake3

from tinsmith import ids
from tinsmith.closed_sessions import closed_session
from tinsmith.errors import InvalidRequest
from tinsmith.messages.checkpoints import CopyCheckpoint
from tinsmith.messages.registry import Run
from tinsmith.messages.table import COPY_CHECKPOINT
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.audit import record
from tinsmith_gateway.auth import token_owner
from tinsmith_gateway.gateway import GATEWAY, Gateway
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.labels import check_project
from tinsmith_gateway.wire.training import check_ttl

if TYPE_CHECKING:
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import Session


async def copy_weights(request: web.Request) -> web.Response:
    """The copy's path; the same for a request that is sent again with its idempotency key."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    asked = await bodies.read_json(request, requests.CopyWeights)
    ttl_s = check_ttl(asked.ttl_seconds)
    token = request.headers.get("X-Tinker-Weights-Access-Token")
    source = await gateway.registry.checkpoint(
        owner, asked.source_path, token_owner=token_owner(gateway.keys, token)
    )
    session, order = await _place(gateway, owner, asked, request.headers.get("X-Idempotency-Key"))
    run = await _run(gateway, session, order, source)
    copy = CopyCheckpoint(path=source.path, model_id=run.model_id, ttl_s=ttl_s)
    made = await gateway.bus.call(COPY_CHECKPOINT, copy)
    gateway.registry.checkpoints.apply(ids.checkpoint_key(ids.parse_path(made.path)), made)
    details = {"tinker_path": made.path, "source_path": source.path}
    await record(gateway, owner, "checkpoint_copied", details)
    return responses.of_json({"tinker_path": made.path})


async def _place(
    gateway: Gateway, owner: str, asked: requests.CopyWeights, repeat_key: str | None
) -> tuple[Session, int]:
    """The session and the slot in it that the copy goes to."""
    if asked.session_id is not None:
        if asked.model_seq_id is None:
            raise InvalidRequest("model_seq_id: missing; a copy into a session needs its slot")
        session = await gateway.registry.session(owner, asked.session_id)
        gateway.sessions.check_active(session)
        return session, asked.model_seq_id
    if asked.destination_project_id is None:
        raise InvalidRequest(
            "destination_project_id, session_id: both are missing; name a project for the copy "
            "(TINKER_PROJECT_ID), or a session"
        )
    project = check_project(asked.destination_project_id, "destination_project_id")
    return await _own_session(gateway, owner, project, repeat_key), 0


async def _own_session(
    gateway: Gateway, owner: str, project: str, repeat_key: str | None
) -> Session:
    """A session that is over and holds only the copy; of a repeated request, the same."""
    session_id = ids.new_session_id()
    if repeat_key:
        # From the key and its owner, so that nobody can guess or take another's.
        named = f"copy\0{owner}\0{repeat_key}".encode(errors="surrogateescape")
        digest = blake3(named).digest(17)
        session_id = base64.b32encode(digest).decode().lower()[:26]
    session = closed_session(session_id, owner, "a copy", project_id=project)
    return await gateway.registry.sessions.table.create(ids.token(session_id), session)


async def _run(gateway: Gateway, session: Session, order: int, source: Checkpoint) -> Run:
    """The run that has the copy and was never trained; InvalidRequest when the slot is taken."""
    model_id = ids.model_id(session.session_id, order)
    wanted = Run(
        model_id=model_id,
        session_id=session.session_id,
        owner=session.owner,
        created_ns=time.time_ns(),
        base_model=source.base_model,
        lora=source.lora,
        optimizer=source.optimizer,
        user_metadata={"copied_from": source.path},
        project_id=session.project_id,
    )
    stored = await gateway.registry.runs.table.create(ids.token(model_id), wanted)
    if stored.user_metadata != wanted.user_metadata:
        raise InvalidRequest(
            f"model_seq_id: {model_id} exists already, and is no copy of {source.path}; "
            "use the next number, or another idempotency key"
        )
    return stored


ROUTES = (web.post("/api/v1/copy_weights", copy_weights),)

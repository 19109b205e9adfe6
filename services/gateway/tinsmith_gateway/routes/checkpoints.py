"""Checkpoints: lists, and what their owner does with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from tinsmith import ids
from tinsmith.errors import InvalidRequest
from tinsmith.messages.checkpoints import ChangeCheckpoint, DeleteCheckpoint
from tinsmith.messages.table import CHANGE_CHECKPOINT, DELETE_CHECKPOINT
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.audit import record
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.registry import MAKERS
from tinsmith_gateway.routes.pages import newest_first, page_of, project_of
from tinsmith_gateway.wire import listings, requests
from tinsmith_gateway.wire.training import check_ttl

if TYPE_CHECKING:
    from tinsmith.messages.checkpoints import Checkpoint

PATH = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"


async def list_run_checkpoints(request: web.Request) -> web.Response:
    """The checkpoints of one model; of somebody else's, those that are published."""
    registry = request.app[GATEWAY].registry
    _, found = await registry.readable_run(request[OWNER], request.match_info["run_id"])
    return responses.of_json({"checkpoints": [listings.checkpoint(c) for c in found]})


async def list_checkpoints(request: web.Request) -> web.Response:
    """The checkpoints of all the caller's models."""
    project, registry = project_of(request), request.app[GATEWAY].registry
    page = page_of(request, default=100)
    runs = registry.runs.group(request[OWNER])
    found = newest_first(
        checkpoint
        for run in runs
        if project is None or run.project_id == project
        for checkpoint in registry.listed_checkpoints(run.model_id)
    )
    shown = [listings.checkpoint(checkpoint) for checkpoint in page.cut(found)]
    return responses.of_json({"checkpoints": shown, "cursor": page.cursor(len(found))})


async def delete_checkpoint(request: web.Request) -> web.Response:
    """Ends a checkpoint, expired or not; its bytes are freed when nothing else has them."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    path = path_in(request)
    found = await gateway.registry.own_checkpoint(owner, path)
    await gateway.bus.call(DELETE_CHECKPOINT, DeleteCheckpoint(path=found.path))
    gateway.registry.checkpoints.apply(ids.checkpoint_key(path), None)
    await record(gateway, owner, "checkpoint_deleted", {"tinker_path": found.path})
    return responses.of_json({})


async def publish(request: web.Request) -> web.Response:
    """Makes a checkpoint readable by every owner; one that is published stays so."""
    return await _set_public(request, is_public=True)


async def unpublish(request: web.Request) -> web.Response:
    """The opposite; who has begun to read may finish."""
    return await _set_public(request, is_public=False)


async def set_ttl(request: web.Request) -> web.Response:
    """Sets when a checkpoint expires, counted from now; null: never."""
    asked = await bodies.read_json(request, requests.SetTtl)
    ttl_s = check_ttl(asked.ttl_seconds)
    path = path_in(request)
    change = ChangeCheckpoint(path=str(path), sets_ttl=True, ttl_s=ttl_s)
    await _change(request, path, change)
    details = {"tinker_path": str(path), "ttl_seconds": str(ttl_s)}
    await record(request.app[GATEWAY], request[OWNER], "checkpoint_ttl_set", details)
    return responses.of_json({})


async def _set_public(request: web.Request, *, is_public: bool) -> web.Response:
    path = path_in(request)
    await _change(request, path, ChangeCheckpoint(path=str(path), public=is_public))
    event = "checkpoint_published" if is_public else "checkpoint_unpublished"
    await record(request.app[GATEWAY], request[OWNER], event, {"tinker_path": str(path)})
    return responses.of_json({})


async def _change(
    request: web.Request, path: ids.CheckpointPath, change: ChangeCheckpoint
) -> Checkpoint:
    gateway = request.app[GATEWAY]
    await gateway.registry.own_checkpoint(request[OWNER], path)
    changed = await gateway.bus.call(CHANGE_CHECKPOINT, change)
    # The watch will tell of it too, but the caller may ask before that.
    gateway.registry.checkpoints.apply(ids.checkpoint_key(path), changed)
    return changed


def path_in(request: web.Request) -> ids.CheckpointPath:
    """The checkpoint that a URL names; InvalidRequest when it cannot name one."""
    run_id, kind, name = (request.match_info[part] for part in ("run_id", "kind", "name"))
    if kind not in MAKERS:
        raise InvalidRequest(f"checkpoint: the kind {kind[:40]!r} is none of {', '.join(MAKERS)}")
    return ids.CheckpointPath(ids.check_model_id(run_id), kind, ids.check_name(name))


ROUTES = (
    web.get("/api/v1/training_runs/{run_id}/checkpoints", list_run_checkpoints),
    web.get("/api/v1/checkpoints", list_checkpoints),
    web.delete(PATH, delete_checkpoint),
    web.post(f"{PATH}/publish", publish),
    web.delete(f"{PATH}/publish", unpublish),
    web.put(f"{PATH}/ttl", set_ttl),
)

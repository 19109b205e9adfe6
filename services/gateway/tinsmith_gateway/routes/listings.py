"""The caller's own sessions, training runs and checkpoints, newest first.

``access_scope`` is not looked at: nothing is shared between owners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith_gateway import responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.registry import Registry, iso_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import Run

MAX_LIMIT = 1000
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class Page(NamedTuple):
    """A stretch of a list."""

    offset: int
    limit: int

    def cut(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items on the page."""
        return items[self.offset : self.offset + self.limit]

    def cursor(self, total: int) -> dict[str, int]:
        """Where the page lies in a list of ``total`` items."""
        return {"offset": self.offset, "limit": self.limit, "total_count": total}


async def list_training_runs(request: web.Request) -> web.Response:
    """The caller's models."""
    _refuse_project(request)
    page, registry = _page(request, default=20), request.app[GATEWAY].registry
    runs = _newest_first(registry.runs.group(request[OWNER]))
    shown = [_training_run(registry, run) for run in page.cut(runs)]
    return responses.of_json({"training_runs": shown, "cursor": page.cursor(len(runs))})


async def get_training_run(request: web.Request) -> web.Response:
    """One model."""
    registry = request.app[GATEWAY].registry
    run = await registry.run(request[OWNER], request.match_info["run_id"])
    return responses.of_json(_training_run(registry, run))


async def list_run_checkpoints(request: web.Request) -> web.Response:
    """The checkpoints of one model."""
    registry = request.app[GATEWAY].registry
    run = await registry.run(request[OWNER], request.match_info["run_id"])
    found = registry.listed_checkpoints(run.model_id)
    return responses.of_json({"checkpoints": [_checkpoint(c) for c in found]})


async def list_checkpoints(request: web.Request) -> web.Response:
    """The checkpoints of all the caller's models."""
    _refuse_project(request)
    page, registry = _page(request, default=100), request.app[GATEWAY].registry
    runs = registry.runs.group(request[OWNER])
    found = _newest_first([c for run in runs for c in registry.listed_checkpoints(run.model_id)])
    shown = [_checkpoint(checkpoint) for checkpoint in page.cut(found)]
    return responses.of_json({"checkpoints": shown, "cursor": page.cursor(len(found))})


async def list_sessions(request: web.Request) -> web.Response:
    """The ids of the caller's sessions, ended ones too."""
    page, registry = _page(request, default=20), request.app[GATEWAY].registry
    sessions = _newest_first(registry.sessions.group(request[OWNER]))
    return responses.of_json({"sessions": [s.session_id for s in page.cut(sessions)]})


async def get_session(request: web.Request) -> web.Response:
    """One session, and what was made in it."""
    registry, owner = request.app[GATEWAY].registry, request[OWNER]
    session = await registry.session(owner, request.match_info["session_id"])
    runs = [r for r in registry.runs.group(owner) if r.session_id == session.session_id]
    samplers = registry.samplers.group(session.session_id)
    return responses.of_json(
        {
            "training_run_ids": [run.model_id for run in reversed(_newest_first(runs))],
            "sampler_ids": [s.sampler_id for s in reversed(_newest_first(samplers))],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }
    )


def _page(request: web.Request, *, default: int) -> Page:
    offset = _number(request, "offset", 0)
    limit = _number(request, "limit", default)
    if offset < 0 or not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(
            f"offset, limit: {offset}, {limit} are outside 0 and up, and 1 to {MAX_LIMIT}"
        )
    return Page(offset, limit)


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"{name}: {text[:40]!r} is not a whole number") from None


def _refuse_project(request: web.Request) -> None:
    if project := request.query.get("project_id"):
        raise NotSupported(
            f"project_id: {project[:80]!r} cannot be filtered by, this server keeps no projects; "
            "leave it out (unset TINKER_PROJECT_ID)"
        )


def _newest_first(items: Sequence[Any]) -> list[Any]:
    return sorted(items, key=lambda item: item.created_ns, reverse=True)


def _training_run(registry: Registry, run: Run) -> dict[str, Any]:
    checkpoints = registry.listed_checkpoints(run.model_id)
    # The registry does not hear of single requests: a checkpoint is the latest it knows.
    latest_ns = max(run.created_ns, *(c.created_ns for c in checkpoints), 0)
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "corrupted": False,
        "last_request_time": iso_time(latest_ns),
        "last_checkpoint": _last(checkpoints, "weights"),
        "last_sampler_checkpoint": _last(checkpoints, "sampler_weights"),
        "user_metadata": run.user_metadata,
    }


def _last(checkpoints: list[Checkpoint], kind: str) -> dict[str, Any] | None:
    return next((_checkpoint(c) for c in checkpoints if c.kind == kind), None)


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    expires_ns = checkpoint.expires_ns
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": iso_time(checkpoint.created_ns),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if expires_ns is None else iso_time(expires_ns),
    }


ROUTES = (
    web.get("/api/v1/training_runs", list_training_runs),
    web.get("/api/v1/training_runs/{run_id}", get_training_run),
    web.get("/api/v1/training_runs/{run_id}/checkpoints", list_run_checkpoints),
    web.get("/api/v1/checkpoints", list_checkpoints),
    web.get("/api/v1/sessions", list_sessions),
    web.get("/api/v1/sessions/{session_id}", get_session),
)

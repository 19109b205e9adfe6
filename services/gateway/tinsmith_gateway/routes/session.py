"""Clients' sessions: their life, what was made in them, and the project that each is in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import structs

from tinsmith import ids
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.audit import record
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import CALLER, OWNER
from tinsmith_gateway.routes.pages import newest_first, page_of
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.labels import check_project
from tinsmith_gateway.wire.listings import texts

if TYPE_CHECKING:
    from tinsmith.messages.registry import Run, Session


MAX_DETAIL = 4000  # characters


async def create_session(request: web.Request) -> web.Response:
    """Opens a session."""
    asked = await bodies.read_json(request, requests.CreateSession)
    if not asked.project_id:
        asked = structs.replace(asked, project_id=request[CALLER].project_id)
    session = await request.app[GATEWAY].sessions.open(request[OWNER], asked)
    return responses.of_json({"type": "create_session", "session_id": session.session_id})


async def session_heartbeat(request: web.Request) -> web.Response:
    """A sign of life; 410 tells the client that the session is over."""
    gateway = request.app[GATEWAY]
    asked = await bodies.read_json(request, requests.SessionRef)
    session = await gateway.registry.session(request[OWNER], asked.session_id)
    await gateway.sessions.heartbeat(session)
    return responses.of_json({"type": "session_heartbeat"})


async def finish_session(request: web.Request) -> web.Response:
    """Ends a session; of several reasons the first stays."""
    gateway = request.app[GATEWAY]
    asked = await bodies.read_json(request, requests.FinishSession)
    session = await gateway.registry.session(request[OWNER], request.match_info["session_id"])
    # Cut, not refused: the session is over whatever its client had to say.
    detail = ": ".join(filter(None, (asked.reason.type, asked.detail)))[:MAX_DETAIL]
    await gateway.sessions.end(session, "finished", detail, reason=asked.reason.type)
    return responses.of_json({})


async def list_sessions(request: web.Request) -> web.Response:
    """The ids of the caller's sessions, ended ones too."""
    page, registry = page_of(request, default=20), request.app[GATEWAY].registry
    sessions = newest_first(registry.sessions.group(request[OWNER]))
    return responses.of_json({"sessions": [s.session_id for s in page.cut(sessions)]})


async def get_session(request: web.Request) -> web.Response:
    """One session, and what was made in it."""
    registry, owner = request.app[GATEWAY].registry, request[OWNER]
    session = await registry.session(owner, request.match_info["session_id"])
    runs = [r for r in registry.runs.group(owner) if r.session_id == session.session_id]
    samplers = registry.samplers.group(session.session_id)
    return responses.of_json(
        {
            "training_run_ids": [run.model_id for run in reversed(newest_first(runs))],
            "sampler_ids": [s.sampler_id for s in reversed(newest_first(samplers))],
            "user_metadata": texts(session.user_metadata),
            "display_name": session.display_name,
        }
    )


async def assign_project(request: web.Request) -> web.Response:
    """Puts a session, with its training runs, into a project: a label to filter by."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    asked = await bodies.read_json(request, requests.SetProject)
    project = check_project(asked.project_id)
    session = await gateway.registry.session(owner, request.match_info["session_id"])
    sessions, runs = gateway.registry.sessions, gateway.registry.runs
    key = ids.token(session.session_id)
    sessions.apply(key, await sessions.table.update(key, lambda entry: _moved(entry, project)))
    for run in runs.group(owner):
        if run.session_id == session.session_id:
            key = ids.token(run.model_id)
            runs.apply(key, await runs.table.update(key, lambda entry: _moved_run(entry, project)))
    details = {"session_id": session.session_id, "project_id": project}
    await record(gateway, owner, "session_project_set", details, topic="projects")
    return responses.of_json({})


def _moved(session: Session | None, project: str) -> Session | None:
    return session and structs.replace(session, project_id=project)


def _moved_run(run: Run | None, project: str) -> Run | None:
    return run and structs.replace(run, project_id=project)


ROUTES = (
    web.post("/api/v1/create_session", create_session),
    web.post("/api/v1/session_heartbeat", session_heartbeat),
    web.post("/api/v1/sessions/{session_id}/finish", finish_session),
    web.get("/api/v1/sessions", list_sessions),
    web.get("/api/v1/sessions/{session_id}", get_session),
    web.put("/api/v1/sessions/{session_id}/project", assign_project),
)

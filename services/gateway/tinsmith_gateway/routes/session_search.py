"""Searching among the caller's sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import listings, requests
from tinsmith_gateway.wire.times import iso_time, microseconds

if TYPE_CHECKING:
    from tinsmith.messages.registry import Session
    from tinsmith_gateway.registry import Registry


async def search_sessions(request: web.Request) -> web.Response:
    """One page of those that match every filter, newest first."""
    registry, owner = request.app[GATEWAY].registry, request[OWNER]
    asked = await bodies.read_json(request, requests.SearchSessions)
    before = _before(asked.cursor)
    found = sorted(
        (s for s in registry.sessions.group(owner) if _matches(s, asked)), key=_age, reverse=True
    )
    rest = [session for session in found if before is None or _age(session) < before]
    page = rest[: asked.limit]
    answer: dict[str, object] = {"sessions": [_summary(registry, session) for session in page]}
    if len(rest) > len(page):
        last = page[-1]
        answer["next_cursor"] = {
            "last_created_at": iso_time(last.created_ns),
            "last_session_id": last.session_id,
        }
    return responses.of_json(answer)


def _summary(registry: Registry, session: Session) -> dict[str, object]:
    runs = [r for r in registry.runs.group(session.owner) if r.session_id == session.session_id]
    checkpoints = [c for run in runs for c in registry.listed_checkpoints(run.model_id)]
    return listings.session_summary(session, checkpoints)


def _matches(session: Session, asked: requests.SearchSessions) -> bool:
    metadata = listings.texts(session.user_metadata)
    return (
        _is_named(session, asked)
        and (asked.project_ids is None or session.project_id in asked.project_ids)
        and asked.user_metadata.items() <= metadata.items()
        # Nobody sees the sessions of others: "accessible" are one's own.
        and (asked.owner.type != "user" or session.owner in asked.owner.owner_urns)
        and (asked.statuses is None or any(_has(session, query) for query in asked.statuses))
    )


def _is_named(session: Session, asked: requests.SearchSessions) -> bool:
    """By id or by name; with both, either will do."""
    if asked.session_id is None and asked.display_name is None:
        return True
    if asked.session_id is not None and session.session_id == asked.session_id:
        return True
    name, words = (session.display_name or "").lower(), (asked.display_name or "").lower().split()
    return bool(words) and all(word in name for word in words)


def _has(session: Session, query: requests.StatusQuery) -> bool:
    status = listings.session_status(session)
    if status["type"] != query.type:
        return False
    return (
        query.reasons is None
        or "reason" not in status
        or (status["reason"]["type"] in query.reasons)
    )


def _age(session: Session) -> tuple[int, str]:
    return session.created_ns // 1000, session.session_id


def _before(cursor: requests.SearchCursor | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    at = microseconds(cursor.last_created_at, "cursor.last_created_at")
    return at, cursor.last_session_id


ROUTES = (web.post("/api/v1/sessions/search", search_sessions),)

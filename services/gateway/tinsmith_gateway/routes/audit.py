"""The trail of what the caller did."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tinsmith.errors import InvalidRequest
from tinsmith_gateway import responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire.times import iso_time

if TYPE_CHECKING:
    from tinsmith.messages.services import AuditEntry

_TOPICS = {"all": "*"} | {name: name for name in ("checkpoints", "keys", "logs", "projects")}
_NEVER = ("teams", "organizations")  # an API key is the only principal here


async def get_audit_log(request: web.Request) -> web.Response:
    """One day's entries (UTC, by default today), oldest first."""
    event_type = request.query.get("event_type", "all")
    day = _day(request.query.get("day"))
    if event_type in _NEVER:
        return responses.of_json({"entries": []})
    if event_type not in _TOPICS:
        known = ", ".join((*_TOPICS, *_NEVER))
        raise InvalidRequest(f"event_type: {event_type[:40]!r} is none of {known}")
    trail = request.app[GATEWAY].bus.audit
    entries = await trail.of_day(request[OWNER], day, _TOPICS[event_type])
    return responses.of_json({"entries": [_entry(entry) for entry in entries]})


def _entry(entry: AuditEntry) -> dict[str, Any]:
    return {
        "timestamp": iso_time(entry.at_ns),
        "event": entry.event,
        "event_details": {"owner": entry.owner, **entry.details},
        "tinker_path": entry.details.get("tinker_path"),
    }


def _day(text: str | None) -> date:
    if text is None:
        return datetime.now(UTC).date()
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"day: {text[:40]!r} is not a date, as in 2026-01-31") from None


ROUTES = (web.get("/api/v1/audit", get_audit_log),)

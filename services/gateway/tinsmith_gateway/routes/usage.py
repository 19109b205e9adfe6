"""What the caller has used, by hour, and what its checkpoints take up now. Nothing has a price."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tinsmith.errors import InvalidRequest
from tinsmith_gateway import responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.routes.pages import project_of
from tinsmith_gateway.wire.listings import texts
from tinsmith_gateway.wire.times import iso_time, microseconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.messages.registry import Usage
    from tinsmith_gateway.registry import Registry

HOUR_US = 3600 * 10**6
MAX_HOURS = 14 * 24
GIGABYTE = 10**9


async def usage_events(request: web.Request) -> web.Response:
    """Hours of use from ``starting_on`` to before ``ending_before``; some minutes late."""
    registry, owner = request.app[GATEWAY].registry, request[OWNER]
    first, end = _hour(request, "starting_on"), _hour(request, "ending_before")
    if not 0 < end - first <= MAX_HOURS:
        raise InvalidRequest(
            f"starting_on, ending_before: {end - first} hours are outside 1 to {MAX_HOURS} "
            "(14 days); ask for less at a time"
        )
    used = [u for u in registry.usage.group(owner) if first <= u.hour < end]
    events = [event for hour in used for event in _events(registry, hour)]
    events.sort(key=lambda e: (e["bucket_start"], -e["event_info"].get("token_count", 0)))
    sessions = {event["session_id"] for event in events if event["session_id"] is not None}
    return responses.of_json(
        {"data": events, "sessions": {key: _session(registry, key) for key in sorted(sessions)}}
    )


async def checkpoint_storage(request: web.Request) -> web.Response:
    """The room that the caller's checkpoints take up now, by project."""
    registry, owner, asked = request.app[GATEWAY].registry, request[OWNER], project_of(request)
    sizes: dict[str | None, list[int]] = defaultdict(list)
    for run in registry.runs.group(owner):
        if asked is None or run.project_id == asked:
            kept = registry.listed_checkpoints(run.model_id)
            sizes[run.project_id] += [checkpoint.size_bytes for checkpoint in kept]
    data = [
        {
            "project_id": project,
            "org_user_urn": owner,
            "checkpoint_count": len(kept),
            "size_bytes": sum(kept),
            "size_gigabytes": sum(kept) / GIGABYTE,
        }
        for project, kept in sorted(sizes.items(), key=lambda item: item[0] or "")
        if kept
    ]
    return responses.of_json({"data": data})


def _events(registry: Registry, used: Usage) -> Iterator[dict[str, Any]]:
    """One event for each kind of use in an hour."""
    session = registry.session_now(used.session_id)
    shared = {
        "bucket_start": iso_time(used.hour * HOUR_US * 1000),
        "bucket_end": iso_time((used.hour + 1) * HOUR_US * 1000),
        "base_model": used.base_model,
        "user_id": used.owner,
        "session_id": used.session_id,
        "project_id": None if session is None else session.project_id,
    }
    for info in _infos(used):
        yield shared | {"event_info": info}


def _infos(used: Usage) -> Iterator[dict[str, Any]]:
    if used.trained_tokens:
        yield {"type": "training", "token_count": used.trained_tokens}
    for cached, tokens in ((False, used.prefill_tokens), (True, used.cached_tokens)):
        if tokens:
            yield {"type": "sampling_prefill", "cached": cached, "token_count": tokens}
    if used.sampled_tokens:
        yield {"type": "sampling_sample", "token_count": used.sampled_tokens}
    if used.checkpoints:
        yield {"type": "checkpoint", "count": used.checkpoints}
    if used.byte_seconds:
        hours = used.byte_seconds / 3600 / GIGABYTE
        # Not "free": clients before 0.38 refuse a field that they do not know here.
        yield {"type": "storage", "gigabyte_hours": hours}


def _session(registry: Registry, session_id: str) -> dict[str, Any]:
    session = registry.session_now(session_id)
    return {"user_metadata": None if session is None else texts(session.user_metadata)}


def _hour(request: web.Request, name: str) -> int:
    text = request.query.get(name)
    if text is None:
        raise InvalidRequest(f"{name}: missing; give the first and the end of the hours")
    hour, rest = divmod(microseconds(text, name), HOUR_US)
    if rest:
        raise InvalidRequest(f"{name}: {text[:40]!r} is not the beginning of an hour (UTC)")
    return hour


ROUTES = (
    web.get("/api/v1/billing/usage/events", usage_events),
    web.get("/api/v1/billing/usage/checkpoints/current", checkpoint_storage),
)

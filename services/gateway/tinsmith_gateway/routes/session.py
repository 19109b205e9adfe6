"""The client's start-up, its session, and what it reports."""

from __future__ import annotations

from aiohttp import web

from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.results import JSON

REFRESH_INTERVAL_S = 300
CHUNK_BYTES = 5_000_000  # the client's default


async def client_config(request: web.Request) -> web.Response:
    """Which of the client's optional ways of working this server takes part in."""
    await bodies.read(request, JSON)
    config = request.app[GATEWAY].config
    return responses.of_json(
        {
            "pjwt_auth_enabled": False,
            "credential_default_source": "api_key",
            "parallel_fwdbwd_chunks": True,
            # The client's own estimate of a chunk's size, which is a little low.
            "fwdbwd_max_chunk_bytes_count": min(CHUNK_BYTES, config.max_body_bytes // 2),
            "proto_compress_fwdbwd": config.compress_training_requests,
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": False,
            "custom_loss_server_side": False,
        }
    )


async def dynamic_config(request: web.Request) -> web.Response:
    """The part of the configuration that clients ask for again from time to time."""
    await bodies.read(request, JSON)
    return responses.of_json(
        {"refresh_interval_sec": REFRESH_INTERVAL_S, "sample_cancel_enabled": False}
    )


async def create_session(request: web.Request) -> web.Response:
    """Opens a session."""
    asked = await bodies.read_json(request, requests.CreateSession)
    session = await request.app[GATEWAY].sessions.open(request[OWNER], asked)
    answer = {"type": "create_session", "session_id": session.session_id}
    if asked.project_id:
        answer["warning_message"] = (
            f"project_id {asked.project_id!r} is ignored: this server keeps no projects"
        )
    return responses.of_json(answer)


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
    detail = ": ".join(filter(None, (asked.reason.type, asked.detail)))
    await gateway.sessions.end(session, "finished", detail)
    return responses.of_json({})


async def telemetry(request: web.Request) -> web.Response:
    """Accepted and dropped unread: reports of errors hold the API key in clear."""
    await bodies.read(request, JSON)
    return responses.of_json({"status": "accepted"})


ROUTES = (
    web.post("/api/v1/client/config", client_config),
    web.post("/api/v1/client/dynamic_config", dynamic_config),
    web.post("/api/v1/create_session", create_session),
    web.post("/api/v1/session_heartbeat", session_heartbeat),
    web.post("/api/v1/sessions/{session_id}/finish", finish_session),
    web.post("/api/v1/telemetry", telemetry),
)

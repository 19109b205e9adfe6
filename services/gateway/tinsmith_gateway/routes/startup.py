"""What a client asks for and tells before and beside its work: configuration and telemetry."""

from __future__ import annotations

from aiohttp import web

from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.wire.results import JSON

REFRESH_INTERVAL_S = 300
CHUNK_BYTES = 5_000_000  # the client's default


async def client_config(request: web.Request) -> web.Response:
    """Which of the client's optional ways of working this server takes part in.

    What is not named here has the client's own default.
    """
    await bodies.read(request, JSON)
    config = request.app[GATEWAY].config
    return responses.of_json(
        {
            # Otherwise the key itself is checked with each request.
            "pjwt_auth_enabled": config.exchange_keys,
            "credential_default_source": "api_key",
            # Chunks may arrive in any order: the trainer restores it, and decoding overlaps.
            "parallel_fwdbwd_chunks": True,
            # The client's own estimate of a chunk's size, which is a little low.
            "fwdbwd_max_chunk_bytes_count": min(CHUNK_BYTES, config.max_body_bytes // 2),
            # Costs both sides more than it saves, unless the network is slow.
            "proto_compress_fwdbwd": config.compress_training_requests,
            # Of clients from 0.22 on, which would send JSON otherwise.
            "proto_write_fwdbwd": True,
            # One request instead of three, for clients before 0.38.
            "create_model_via_load_weights": True,
            # One poll for all samples of a client, or one for each, which is answered sooner.
            "sample_use_retrieve_futures": config.batch_polls,
            # Copies of a client then never use one number twice.
            "sample_join_sampling_session": True,
            # A lost sample costs the loop a step: the client's own retries are cheaper.
            "sample_no_retries": False,
            # One pass instead of two, and no log-probabilities on the way; see loss_graphs.
            "custom_loss_server_side": True,
        }
    )


async def dynamic_config(request: web.Request) -> web.Response:
    """The part of the configuration that clients ask for again from time to time."""
    await bodies.read(request, JSON)
    return responses.of_json(
        {
            # Nothing here changes while a server runs; clients notice a new one soon enough.
            "refresh_interval_sec": REFRESH_INTERVAL_S,
            # Samples that nobody waits for any more stop at once, and make room for others.
            "sample_cancel_enabled": True,
        }
    )


async def telemetry(request: web.Request) -> web.Response:
    """Accepted and dropped unread: reports of errors hold the API key in clear."""
    await bodies.read(request, JSON)
    return responses.of_json({"status": "accepted"})


ROUTES = (
    web.post("/api/v1/client/config", client_config),
    web.post("/api/v1/client/dynamic_config", dynamic_config),
    web.post("/api/v1/telemetry", telemetry),
)

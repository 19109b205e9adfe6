"""Polling for results.

Clients poll again at once after any status from 500 on, without end: what cannot be answered
here must be a failed future, not an HTTP error.
"""

from __future__ import annotations

import structlog
from aiohttp import web

from tinsmith import ids
from tinsmith.errors import ServerError, UserError
from tinsmith.messages.base import Failed
from tinsmith.messages.failures import to_failed
from tinsmith.metrics import names as metrics
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.futures import Pending
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER, crash_message
from tinsmith_gateway.wire import json_answers, requests, results

log = structlog.get_logger(__name__)


async def retrieve_future(request: web.Request) -> web.Response:
    """The result; 408 when there is none yet; 200 with ``error`` when there never will be."""
    gateway = request.app[GATEWAY]
    asked = await bodies.read_json(request, requests.RetrieveFuture)
    structlog.contextvars.bind_contextvars(request_id=asked.request_id)
    try:
        found = await gateway.futures.poll(request[OWNER], asked.request_id)
    except UserError:
        raise
    except ServerError as error:
        log.exception("result unreadable")
        found = results.failed(to_failed(error))
    except Exception:
        log.exception("poll crashed")
        found = results.failed(Failed(category="server", message=crash_message()))
    gateway.sessions.touch(ids.session_of(asked.request_id))
    if isinstance(found, Pending):
        return _try_again(asked.request_id, found)
    gateway.unfinished.done(asked.request_id)
    accept = request.headers.get("Accept", "")
    if found.content_type == results.PROTOBUF and json_answers.is_wanted(accept):
        found = json_answers.of(found.body, ids.parse_future_id(asked.request_id).kind)
    if asked.allow_metadata_only and len(found.body) > gateway.config.announce_bytes:
        # The client makes room for so many bytes and asks again.
        size = len(found.body)
        return responses.of_json({"status": "complete_metadata", "response_payload_size": size})
    metrics.FUTURES_ANSWERED.labels(_kind(asked.request_id), found.outcome).inc()
    return responses.of_payload(found)


def _kind(request_id: str) -> str:
    return "sample" if ":sample:" in request_id else "train"


def _try_again(request_id: str, pending: Pending) -> web.Response:
    answer = {"type": "try_again", "request_id": request_id, "queue_state": pending.state}
    if pending.reason is not None:
        answer["queue_state_reason"] = pending.reason
    return responses.of_json(answer, status=408)


ROUTES = (web.post("/api/v1/retrieve_future", retrieve_future),)

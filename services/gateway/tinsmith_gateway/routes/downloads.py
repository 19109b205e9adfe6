"""Downloads by links that need no key, and the routes that give such links out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from aiohttp import web

from tinsmith.errors import BlobMissing, InvalidRequest
from tinsmith_gateway import responses
from tinsmith_gateway.archive import Archive
from tinsmith_gateway.audit import record
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import DOWNLOADS, OWNER
from tinsmith_gateway.routes.checkpoints import PATH, path_in
from tinsmith_gateway.signing import Ticket
from tinsmith_gateway.trace import trace
from tinsmith_gateway.wire.results import JSON

if TYPE_CHECKING:
    from tinsmith_gateway.gateway import Gateway

LINK_S = 3600


async def get_archive(request: web.Request) -> web.Response:
    """A link to a checkpoint as a tar file, as clients before 0.38 ask for it."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    found = await gateway.registry.checkpoint(owner, str(path_in(request)))
    link = await _link(request, "archive", found.path, f"{found.name}.tar")
    details = {"tinker_path": found.path, "purpose": "download"}
    await record(gateway, owner, "checkpoint_read", details)
    answer = responses.of_json({"url": link}, status=302)
    answer.headers["Location"] = link
    answer.headers["Expires"] = time.strftime(
        "%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + LINK_S)
    )
    return answer


async def export_trace(request: web.Request) -> web.Response:
    """A link to a session's trace."""
    gateway, session_id = request.app[GATEWAY], request.match_info["session_id"]
    session = await gateway.registry.session(request[OWNER], session_id)
    link = await _link(request, "trace", session.session_id, f"{session.session_id}.pftrace")
    return responses.of_json({"status": "ready", "url": link})


async def download(request: web.Request) -> web.StreamResponse:
    """What a link opens; its owner was checked when it was made."""
    gateway = request.app[GATEWAY]
    ticket = await gateway.signer.read(request.match_info["ticket"])
    if ticket.kind == "trace":
        return web.Response(body=await _trace(gateway, ticket.subject), content_type=JSON)
    found = await gateway.registry.linked_checkpoint(ticket.subject)
    for name, ref in found.parts.items():
        if not await gateway.bus.blobs.has(ref):  # said now, since an answer that has begun cannot
            raise BlobMissing(f"{name} of {found.path} is not in the blob store")
    archive = Archive(found.parts, created_s=found.created_ns // 10**9)
    return await _send(request, gateway, archive)


async def _send(request: web.Request, gateway: Gateway, archive: Archive) -> web.StreamResponse:
    start, end = _range(request, archive.size)
    is_part = "Range" in request.headers
    headers = {"Accept-Ranges": "bytes", "Content-Type": "application/x-tar"}
    if is_part:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{archive.size}"
    answer = web.StreamResponse(status=206 if is_part else 200, headers=headers)
    answer.content_length = end - start
    await answer.prepare(request)
    async for data in archive.read(gateway.bus.blobs, start, end):
        await answer.write(data)
    await answer.write_eof()
    return answer


def _range(request: web.Request, size: int) -> tuple[int, int]:
    try:
        start, end, _ = request.http_range.indices(size)
    except ValueError:
        start = end = 0
    if start >= end:
        raise InvalidRequest(
            f"Range: {request.headers.get('Range', '')[:80]!r} is not a part of {size} bytes"
        )
    return start, end


async def _trace(gateway: Gateway, session_id: str) -> bytes:
    session = gateway.registry.session_now(session_id)
    runs = () if session is None else gateway.registry.runs.group(session.owner)
    models = sorted(run.model_id for run in runs if run.session_id == session_id)
    samplers = sorted(s.sampler_id for s in gateway.registry.samplers.group(session_id))
    return await trace(gateway.bus.facts, models, samplers)


async def _link(
    request: web.Request, kind: Literal["archive", "trace"], subject: str, name: str
) -> str:
    gateway = request.app[GATEWAY]
    ticket = Ticket(kind, subject, int(time.time()) + LINK_S)
    base = gateway.config.public_url.rstrip("/") or _origin(request)
    return f"{base}{DOWNLOADS}{await gateway.signer.sign(ticket)}/{name}"


def _origin(request: web.Request) -> str:
    try:
        return str(request.url.origin())
    except ValueError:
        raise InvalidRequest(
            f"Host: {request.host[:80]!r} is no address that a link can be made of; send the "
            "server's, or set gateway.public_url"
        ) from None


ROUTES = (
    web.get(f"{PATH}/archive", get_archive),
    web.get("/api/v1/sessions/{session_id}/trace_export", export_trace),
    web.get(f"{DOWNLOADS}{{ticket}}/{{name}}", download),
)

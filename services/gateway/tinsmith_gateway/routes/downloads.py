"""Downloads by links that need no key, and the routes that give such links out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import web

from tinsmith.errors import BlobMissing, InvalidRequest, NotFound
from tinsmith.parts import check_manifest
from tinsmith_gateway import responses
from tinsmith_gateway.archive import archive, single
from tinsmith_gateway.audit import record
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import DOWNLOADS, OWNER
from tinsmith_gateway.routes.checkpoints import PATH, path_in
from tinsmith_gateway.signing import Ticket
from tinsmith_gateway.trace import trace
from tinsmith_gateway.wire.results import JSON
from tinsmith_gateway.wire.times import iso_time

if TYPE_CHECKING:
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith_gateway.archive import Content
    from tinsmith_gateway.gateway import Gateway

LINK_S = 3600


async def get_archive(request: web.Request) -> web.Response:
    """A link to a checkpoint as a tar file, as clients before 0.38 ask for it."""
    gateway = request.app[GATEWAY]
    found = await gateway.registry.checkpoint(request[OWNER], str(path_in(request)))
    ticket = Ticket("archive", found.path, int(time.time()) + LINK_S)
    link = await _link(request, ticket, f"{found.name}.tar")
    await _record_read(request, found.path)
    answer = responses.of_json({"url": link}, status=302)
    answer.headers["Location"] = link
    answer.headers["Expires"] = time.strftime(
        "%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + LINK_S)
    )
    return answer


async def get_external_weights_urls(request: web.Request) -> web.Response:
    """A link to each file of weights that were saved for other tools."""
    gateway = request.app[GATEWAY]
    found = await gateway.registry.checkpoint(request[OWNER], str(path_in(request)))
    if found.kind != "external_weights":
        raise InvalidRequest(
            f"path: {found.path} is of kind {found.kind!r}, which is not downloaded file by file; "
            "save with save_weights_external, or ask for its archive"
        )
    expires_s = int(time.time()) + LINK_S
    if found.expires_ns is not None:
        expires_s = min(expires_s, found.expires_ns // 10**9)
    urls = {
        name: await _link(request, Ticket("file", found.path, expires_s, ref.blake3), name)
        for name, ref in sorted(found.parts.items())
    }
    await _record_read(request, found.path)
    return responses.of_json({"urls": urls, "expires": iso_time(expires_s * 10**9)})


async def export_trace(request: web.Request) -> web.Response:
    """A link to a session's trace."""
    gateway, session_id = request.app[GATEWAY], request.match_info["session_id"]
    session = await gateway.registry.session(request[OWNER], session_id)
    ticket = Ticket("trace", session.session_id, int(time.time()) + LINK_S)
    link = await _link(request, ticket, f"{session.session_id}.pftrace")
    return responses.of_json({"status": "ready", "url": link})


async def download(request: web.Request) -> web.StreamResponse:
    """What a link opens; its owner was checked when it was made."""
    gateway = request.app[GATEWAY]
    ticket = await gateway.signer.read(request.match_info["ticket"])
    if ticket.kind == "trace":
        return web.Response(body=await _trace(gateway, ticket.subject), content_type=JSON)
    found = await gateway.registry.linked_checkpoint(ticket.subject)
    check_manifest(found)
    parts = _opened(ticket, found)
    for name, ref in parts.items():
        if not await gateway.bus.blobs.has(ref):  # said now, since an answer that has begun cannot
            raise BlobMissing(f"{name} of {found.path} is not in the blob store")
    if ticket.kind == "file":
        return await _send(request, gateway, single(*parts.values()))
    return await _send(request, gateway, archive(parts, created_s=found.created_ns // 10**9))


def _opened(ticket: Ticket, found: Checkpoint) -> dict[str, BlobRef]:
    """The parts that ``ticket`` gives out; NotFound when others have taken their place."""
    if ticket.kind != "file":
        return found.parts
    for name, ref in found.parts.items():
        if ref.blake3 == ticket.blake3:
            return {name: ref}
    raise NotFound(f"{found.path} was saved anew since this link was made; ask for a new one")


async def _send(request: web.Request, gateway: Gateway, content: Content) -> web.StreamResponse:
    if (wanted := _range(request, content.size)) is None:
        return _unsatisfiable(request, content.size)
    start, end = wanted
    is_part = "Range" in request.headers
    headers = {"Accept-Ranges": "bytes", "Content-Type": content.content_type}
    if is_part:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{content.size}"
    answer = web.StreamResponse(status=206 if is_part else 200, headers=headers)
    answer.content_length = end - start
    await answer.prepare(request)
    if request.method != "HEAD":
        async for data in content.read(gateway.bus.blobs, start, end):
            await answer.write(data)  # returns when the client has taken most of what was written
    await answer.write_eof()
    return answer


def _range(request: web.Request, size: int) -> tuple[int, int] | None:
    """The bytes that are asked for; None when there are none such."""
    try:
        start, end, _ = request.http_range.indices(size)
    except ValueError:
        return None
    return (start, end) if start < end else None


def _unsatisfiable(request: web.Request, size: int) -> web.Response:
    """What tells a client that takes up a download that it has all of it already."""
    wanted = request.headers.get("Range", "")[:80]
    message = f"Range: {wanted!r} is not a part of {size} bytes"
    return responses.detail(416, message, headers={"Content-Range": f"bytes */{size}"})


async def _trace(gateway: Gateway, session_id: str) -> bytes:
    session = gateway.registry.session_now(session_id)
    runs = () if session is None else gateway.registry.runs.group(session.owner)
    models = sorted(run.model_id for run in runs if run.session_id == session_id)
    samplers = sorted(s.sampler_id for s in gateway.registry.samplers.group(session_id))
    return await trace(gateway.bus.facts, models, samplers)


async def _record_read(request: web.Request, path: str) -> None:
    details = {"tinker_path": path, "purpose": "download"}
    await record(request.app[GATEWAY], request[OWNER], "checkpoint_read", details)


async def _link(request: web.Request, ticket: Ticket, name: str) -> str:
    gateway = request.app[GATEWAY]
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
    web.get(f"{PATH}/external_weights_urls", get_external_weights_urls),
    web.get("/api/v1/sessions/{session_id}/trace_export", export_trace),
    web.get(f"{DOWNLOADS}{{ticket}}/{{name}}", download),
)

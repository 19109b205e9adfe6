"""The dashboard: a page without data, for anybody, and the data, for who has a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from blake3 import blake3

from tinsmith.errors import InvalidRequest
from tinsmith_gateway import responses
from tinsmith_gateway.dashboard import files
from tinsmith_gateway.dashboard.curves import MAX_POINTS
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import CALLER, PAGE_FILES
from tinsmith_gateway.routes.pages import MAX_OFFSET, page_of
from tinsmith_gateway.wire import results

if TYPE_CHECKING:
    from tinsmith_gateway.dashboard.files import PageFile

PREFIX = "/api/v1/dashboard"
_FILES = files.read()


async def page(request: web.Request) -> web.Response:
    """The page itself."""
    return _sent(request, _FILES[files.INDEX])


async def page_file(request: web.Request) -> web.Response:
    """What the page is made of besides."""
    found = _FILES.get(request.match_info["name"])
    if found is None:
        raise web.HTTPNotFound
    return _sent(request, found)


async def overview(request: web.Request) -> web.Response:
    """What goes on, as far as the caller may see it."""
    desk = request.app[GATEWAY].dashboard
    return _told(request, await desk.overview(request[CALLER]))


async def list_runs(request: web.Request) -> web.Response:
    """The runs that the caller may see, those that are over too."""
    runs = await request.app[GATEWAY].dashboard.runs(request[CALLER])
    part = page_of(request, default=50)
    return _told(request, {"runs": part.cut(runs), "cursor": part.cursor(len(runs))})


async def get_run(request: web.Request) -> web.Response:
    """One run, with the end of its log."""
    desk = request.app[GATEWAY].dashboard
    return _told(request, await desk.run(request[CALLER], request.match_info["run_id"]))


async def get_curves(request: web.Request) -> web.Response:
    """What a run's operations measured behind ``after``, at no more than ``points`` points."""
    desk, run_id = request.app[GATEWAY].dashboard, request.match_info["run_id"]
    after = _number(request, "after", -1, -1, MAX_OFFSET)
    points = _number(request, "points", MAX_POINTS, 1, MAX_POINTS)
    return _told(request, await desk.curves(request[CALLER], run_id, after=after, points=points))


def _told(request: web.Request, value: object) -> web.Response:
    """``value`` as JSON, or that it has not changed since the caller got it."""
    payload = results.json_payload(value)
    response = responses.of_payload(payload)
    response.headers["Cache-Control"] = "no-store"  # nothing of it on the disk of a browser
    return _unless_known(request, response, blake3(payload.body).hexdigest(8))


def _sent(request: web.Request, file: PageFile) -> web.Response:
    response = web.Response(
        body=file.body, content_type=file.content_type, charset="utf-8", headers=files.HEADERS
    )
    return _unless_known(request, response, file.etag)


def _unless_known(request: web.Request, response: web.Response, etag: str) -> web.Response:
    if any(known.value == etag for known in request.if_none_match or ()):
        kept = {k: v for k, v in response.headers.items() if not k.startswith("Content-")}
        response = web.Response(status=304, headers=kept)
    response.etag = etag
    return response


def _number(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query.get(name, str(default))
    try:
        number = int(text)
    except ValueError:
        raise InvalidRequest(f"{name}: {text[:40]!r} is not a whole number") from None
    if not low <= number <= high:
        raise InvalidRequest(f"{name}: {number:.6g} is outside {low} to {high}; ask within")
    return number


ROUTES = (
    web.get("/", page),
    web.get(PAGE_FILES + "{name}", page_file),
    web.get(f"{PREFIX}/overview", overview),
    web.get(f"{PREFIX}/runs", list_runs),
    web.get(f"{PREFIX}/runs/{{run_id}}", get_run),
    web.get(f"{PREFIX}/runs/{{run_id}}/curves", get_curves),
)

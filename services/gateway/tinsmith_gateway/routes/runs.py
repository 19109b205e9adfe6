"""Training runs: the caller's own, and one that somebody has published something of."""

from __future__ import annotations

from aiohttp import web

from tinsmith_gateway import responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.routes.pages import newest_first, page_of, project_of
from tinsmith_gateway.wire import listings


async def list_training_runs(request: web.Request) -> web.Response:
    """The caller's models, of one project if that is asked for."""
    project, registry = project_of(request), request.app[GATEWAY].registry
    page = page_of(request, default=20)
    runs = newest_first(
        run
        for run in registry.runs.group(request[OWNER])
        if project is None or run.project_id == project
    )
    shown = [
        listings.training_run(run, registry.listed_checkpoints(run.model_id))
        for run in page.cut(runs)
    ]
    return responses.of_json({"training_runs": shown, "cursor": page.cursor(len(runs))})


async def get_training_run(request: web.Request) -> web.Response:
    """One model; with ``access_scope`` accessible, anybody's with a published checkpoint."""
    registry, owner = request.app[GATEWAY].registry, request[OWNER]
    run_id = request.match_info["run_id"]
    if request.query.get("access_scope") == "accessible":
        run, checkpoints = await registry.readable_run(owner, run_id)
    else:
        run = await registry.run(owner, run_id)
        checkpoints = registry.listed_checkpoints(run.model_id)
    return responses.of_json(listings.training_run(run, checkpoints))


ROUTES = (
    web.get("/api/v1/training_runs", list_training_runs),
    web.get("/api/v1/training_runs/{run_id}", get_training_run),
)

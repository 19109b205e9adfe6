"""One poll for all the samples of a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from tinsmith import ids
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import requests

if TYPE_CHECKING:
    from tinsmith.bus.facts import Fact


async def retrieve_futures(request: web.Request) -> web.Response:
    """Those that are done since the client's cursor; their results are read one by one.

    ``retrieved_request_ids`` is not needed: results stay readable for some hours.
    """
    gateway = request.app[GATEWAY]
    asked = await bodies.read_json(request, requests.RetrieveFutures)
    target = asked.target
    sampler = await gateway.registry.sampler(request[OWNER], target.sampling_session_id)
    found = await gateway.completions.wait(
        sampler.sampler_id,
        target.cloned_sampler_id,
        after=asked.prev_cursor,
        timeout_s=asked.timeout,
    )
    gateway.sessions.touch(sampler.session_id)
    completions = [_completion(sampler.sampler_id, fact) for fact in found.facts]
    return responses.of_json({"completions": completions, "cursor": found.cursor})


def _completion(sampler_id: str, fact: Fact) -> dict[str, str]:
    has_failed = fact.costs is not None and fact.costs.failed > 0
    state = "failed" if has_failed else "finished"
    return {"state": state, "request_id": ids.future_id(sampler_id, fact.seq)}


ROUTES = (web.post("/api/v1/retrieve_futures", retrieve_futures),)

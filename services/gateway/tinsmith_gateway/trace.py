"""What was done in a session, as a trace that ui.perfetto.dev shows.

Made from what is stored: for each op of a run, and each sampling request of the last hours, when
its result was there. When it had begun is not known, so that there are moments and no spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from tinsmith.bus.facts import Fact, Facts

_KINDS = {"trained": "forward_backward", "saved": "save", "sampled": "sample", "failed": "failed"}


async def trace(facts: Facts, models: Iterable[str], samplers: Iterable[str]) -> bytes:
    """Trace Event JSON of these models and sampling sessions, given by their ids."""
    events: list[dict[str, Any]] = []
    for model in models:
        events += [event async for event in _events(model, facts.of_log(first=1, model=model))]
    for sampler in samplers:
        results = facts.of_results(first=1, sampler=sampler)
        events += [event async for event in _events(sampler, results)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


async def _events(target: str, facts: AsyncIterator[Fact]) -> AsyncIterator[dict[str, Any]]:
    named = {"name": "thread_name", "ph": "M", "pid": 1, "tid": target, "args": {"name": target}}
    yield named
    async for fact in facts:
        costs = {} if fact.costs is None else msgspec.to_builtins(fact.costs)
        costs.pop("loaded", None)
        kind = next((name for cost, name in _KINDS.items() if costs.get(cost)), "op")
        yield {
            "name": kind,
            "ph": "i",
            "s": "t",
            "pid": 1,
            "tid": target,
            "ts": fact.at_s * 1e6,
            "args": {"seq": fact.seq, **costs},
        }

"""One sampling request on one engine: its rows and its score side by side, as one answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tinsmith_sampler import measuring, rows
from tinsmith_sampler.checks import check, check_routes

if TYPE_CHECKING:
    from tinsmith.messages.sampling import Sample, SampleDone
    from tinsmith_sampler.checks import Limits
    from tinsmith_sampler.engine import Engine, Scored, Scoring
    from tinsmith_sampler.rows import Tell


async def answer(
    engine: Engine, sample: Sample, limits: Limits, tell: Tell | None = None
) -> SampleDone:
    """Serve a request whose adapter is loaded; its rows share one pass over the prompt.

    ``tell`` is called with their tokens while they are drawn, from the engine's thread.

    Raises the first error of any of its rows, after the others have been stopped. Cancelling
    stops them all.
    """
    prompt = check(sample, limits)
    check_routes(sample, len(prompt), limits, engine.route_bytes)
    try:
        async with asyncio.TaskGroup() as group:
            # The score comes first in the queue: the rows then find its pass over the prompt.
            score = group.create_task(_score(engine, rows.scoring(sample, prompt)))
            drawn = [
                group.create_task(engine.generate(row), name=f"row {row.request_id}/{row.index}")
                for row in rows.expand(sample, prompt, limits, tell)
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    made = [task.result() for task in drawn]
    measuring.drawn(len(prompt), made)
    return rows.assemble(sample, made, score.result(), engine.plane, engine.root)


async def _score(engine: Engine, scoring: Scoring | None) -> Scored | None:
    return None if scoring is None else await engine.score(scoring)

"""Telling a gateway of tokens while they are drawn: quickly, and without a promise."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tinsmith.messages.sampling import TokensDrawn
from tinsmith.messages.table import TOKENS_DRAWN
from tinsmith_sampler.rows import topk_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.bus import Bus
    from tinsmith.messages.sampling import Sample
    from tinsmith_sampler.engine import Drawn
    from tinsmith_sampler.rows import Tell


@asynccontextmanager
async def telling(bus: Bus, sample: Sample) -> AsyncIterator[Tell | None]:
    """Inside the block what is given is passed on; None for a request that nobody listens to."""
    if not sample.tell:
        yield None
        return
    drawn: asyncio.Queue[Drawn] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    passing_on = asyncio.create_task(_pass_on(bus, sample, drawn), name="telling")
    try:
        yield lambda one: _hand_over(loop, drawn, one)
    finally:
        passing_on.cancel()
        await asyncio.wait([passing_on])


def _hand_over(loop: asyncio.AbstractEventLoop, drawn: asyncio.Queue[Drawn], one: Drawn) -> None:
    """Called on the engine's thread, which may outlive the loop by a round."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(drawn.put_nowait, one)


async def _pass_on(bus: Bus, sample: Sample, drawn: asyncio.Queue[Drawn]) -> None:
    while True:
        one = await drawn.get()
        told = TokensDrawn(
            request_id=sample.request_id,
            index=one.index,
            start=one.start,
            tokens=one.tokens.astype("<i4", copy=False).tobytes(),
            logprobs=one.logprobs.astype("<f4", copy=False).tobytes(),
            topk=topk_of(one.topk),
        )
        await bus.emit(TOKENS_DRAWN, told, gateway=sample.tell)

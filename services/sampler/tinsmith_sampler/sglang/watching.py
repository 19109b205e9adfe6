"""What a server counts, as figures of the sampler's pings."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from tinsmith.errors import ServerError
from tinsmith_sampler.sglang.failures import SglangError

if TYPE_CHECKING:
    from tinsmith_sampler.sglang.starts import Starts

EVERY_S = 10.0

_FIGURES = {
    "sglang:num_running_reqs": "sglang_running",
    "sglang:num_queue_reqs": "sglang_queued",
    "sglang:token_usage": "sglang_cache_share",
    "sglang:cache_hit_rate": "sglang_cache_hits",
    "sglang:gen_throughput": "sglang_tokens_per_s",
    "sglang:num_retracted_reqs": "sglang_retracted",
}


async def watch(starts: Starts, figures: dict[str, float]) -> None:
    """Until cancelled: read the server's metrics into ``figures``."""
    while True:
        with suppress(SglangError, ServerError):  # it is being restarted; or it has none
            client = await starts.client()
            figures |= parsed(await client.metrics())
        await asyncio.sleep(EVERY_S)


def parsed(text: str) -> dict[str, float]:
    """The figures in a text in the format of Prometheus; those of several ranks are added up."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        name = _FIGURES.get(series.partition("{")[0])
        if name is not None:
            found[name] = found.get(name, 0.0) + float(value)
    return found

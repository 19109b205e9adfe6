"""What is counted of requests, whichever engine answers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.messages.sampling import SampleFailed
from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.messages.sampling import SampleResult
    from tinsmith_sampler.engine import Engine, Generated


def watch(engine: Engine) -> None:
    """Tell of the engine's rows from now on."""
    metrics.ROWS.labels("running").set_function(lambda: engine.load().running)
    metrics.ROWS.labels("queued").set_function(lambda: engine.load().queued)
    metrics.ROWS.labels("free").set_function(lambda: engine.load().free_rows)


def drawn(prompt_tokens: int, rows: Iterable[Generated]) -> None:
    """These rows of a prompt were drawn."""
    for row in rows:
        metrics.PROMPT_TOKENS.inc(prompt_tokens)
        metrics.CACHED_TOKENS.inc(row.cached_tokens)
        metrics.DRAWN_TOKENS.inc(len(row.tokens))


def ended(result: SampleResult) -> str:
    """A request has this result; its outcome in a word."""
    outcome = result.failure.category if isinstance(result, SampleFailed) else "done"
    metrics.SAMPLE_REQUESTS.labels(outcome).inc()
    return outcome

"""What a process's listener answers: metrics, and whether it works and can do its work."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from tinsmith.metrics import exposition, names
from tinsmith.metrics.listener import Page, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.health import Health
    from tinsmith.metrics.config import MetricsConfig
    from tinsmith.metrics.exposition import Exposition


@asynccontextmanager
async def telling(config: MetricsConfig, told: Exposition, health: Health) -> AsyncIterator[str]:
    """Answer inside the block; gives the listener's URL, or "" when there is none.

    Raises:
        StartupError: the address cannot be listened on.
    """
    names.READY.set_function(lambda: float(not health.readiness().missing))
    if not config.enabled:
        yield ""
        return
    pages = {
        "/metrics": lambda: Page(told.text(), exposition.CONTENT_TYPE),
        "/healthz": lambda: Page(b'{"status":"ok"}'),
        "/readyz": lambda: _ready(health),
    }
    async with serving(config.host, config.port, pages) as url:
        yield url


def _ready(health: Health) -> Page:
    found = health.readiness()
    return Page(msgspec.json.encode(found.body()), status=found.status)

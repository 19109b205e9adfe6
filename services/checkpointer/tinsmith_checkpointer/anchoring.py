"""Anchors the heads of all logs, every so often and once more at the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tinsmith.errors import TinsmithError

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from tinsmith.bus import Anchors

LAST_S = 3.0  # what the last anchor may take; the next checkpointer makes up for it


async def keep_anchoring(
    anchors: Anchors, log: BoundLogger, *, every_s: float, stopping: asyncio.Event
) -> None:
    """Anchor at once, then every ``every_s`` until ``stopping``, and once more.

    An anchor that fails is only late: the next one covers what it would have covered.
    """
    while not stopping.is_set():
        await _anchor(anchors, log)
        try:
            async with asyncio.timeout(every_s):
                await stopping.wait()
        except TimeoutError:
            continue
    try:
        async with asyncio.timeout(LAST_S):
            await _anchor(anchors, log)
    except TimeoutError:
        log.warning("not anchored before the end", patience_s=LAST_S)


async def _anchor(anchors: Anchors, log: BoundLogger) -> None:
    try:
        written = await anchors.anchor()
    except TinsmithError as exc:
        log.warning("logs not anchored", error=str(exc))
    else:
        log.debug("logs anchored", anchors=written)

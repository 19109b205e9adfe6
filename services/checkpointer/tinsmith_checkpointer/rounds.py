"""Rounds of upkeep: watched tables, and something that is done with them every so often."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NoReturn

from tinsmith.errors import TinsmithError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from structlog.stdlib import BoundLogger

    from tinsmith.bus import Subscription

    Watch = Callable[[], Awaitable[Subscription]]


async def keep_going_round(
    go_round: Callable[[], Awaitable[None]],
    watches: Iterable[Watch],
    log: BoundLogger,
    *,
    every_s: float,
) -> NoReturn:
    """Until cancelled. A round that fails is told, and made up for by the next one."""
    async with AsyncExitStack() as stack:
        for watch in watches:
            stack.push_async_callback((await watch()).close)
        while True:
            try:
                await go_round()
            except TinsmithError as exc:
                log.warning("round interrupted", round=go_round.__qualname__, error=str(exc))
            await asyncio.sleep(every_s)

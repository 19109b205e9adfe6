"""A handle on something that goes on in the background until it is closed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Subscription:
    """Closing is idempotent and waits for the end."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close: Callable[[], Awaitable[None]] | None = close

    @classmethod
    def of_task(cls, task: asyncio.Task[None]) -> Subscription:
        """Closing cancels ``task`` and waits for it."""

        async def close() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        return cls(close)

    async def close(self) -> None:
        """Stop, and wait until nothing of it runs any more."""
        close, self._close = self._close, None
        if close is not None:
            await close()

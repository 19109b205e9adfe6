"""Whether a server is paused, and what has to wait until it is not."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Pausing:
    """Keeps pauses and what would hang in one apart."""

    def __init__(self) -> None:
        self.is_paused = False
        self._busy = 0  # blocks of ``unpaused`` that run
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def pausing(self) -> AsyncIterator[None]:
        """The block tells the server. Waits for what may not meet a pause, and holds off more."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._busy)
            # Before the block: it may fail after the server has paused.
            self.is_paused = True
        yield

    async def resumed(self) -> None:
        """The server goes on."""
        async with self._changed:
            self.is_paused = False
            self._changed.notify_all()

    @asynccontextmanager
    async def unpaused(self) -> AsyncIterator[None]:
        """In the block the server is not paused."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_paused)
            self._busy += 1
        try:
            yield
        finally:
            async with self._changed:
                self._busy -= 1
                self._changed.notify_all()

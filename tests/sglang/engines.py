"""Engines on servers that run already, and what they are compared with."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tinsmith_sampler.sglang.client import SglangClient
from tinsmith_sampler.sglang.engine import SglangEngine
from tinsmith_sampler.sglang.server import GivenServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EXACT = 1e-4  # log-probabilities of one model in float32, by two implementations
MAX_RANK = 16
MAX_ROWS = 8


@asynccontextmanager
async def engine_on(server, **options) -> AsyncIterator[SglangEngine]:
    """An engine on the session's server, or on the one that ``new_server`` gives."""
    chosen = {"max_rows": MAX_ROWS, "max_rank": MAX_RANK} | options
    new_server = chosen.pop("new_server", None) or (
        lambda _: GivenServer(server.url, key=server.key)
    )
    engine = SglangEngine(str(server.model), new_server, **chosen)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


class Renewed:
    """The session's server, for an engine that can lose it at will; it is not ended by us.

    A new client knows no adapters either, as if its server had been started anew.
    """

    def __init__(self, server) -> None:
        self._server = server
        self._ended = asyncio.Event()
        self.client: SglangClient | None = None

    async def start(self):
        return await self.renew()

    async def renew(self):
        """The client of before fails from now on, as when its server dies."""
        server, lost = self._server, self.client
        self.client = SglangClient(server.url, key=server.key, folder=server.folder)
        if lost is not None:
            await lost.close()
        return self.client

    async def current(self):
        return self.client

    async def wait_ended(self):
        await self._ended.wait()

    async def close(self):
        if self.client.is_paused:  # a test has failed in between
            await self.client.resume()
        await self.client.close()
        self._ended.set()

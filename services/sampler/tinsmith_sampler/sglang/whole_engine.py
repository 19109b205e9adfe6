"""An engine on an SGLang server of its own, whose model itself is replaced, version by version.

A start of the server has the weights of the folder. Once a receiver writes them, nothing is drawn
on a start whose memory does not hold what the receiver last wrote and proved.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tinsmith.errors import StartupError, VersionUnmet
from tinsmith.weights.state import WrongBits
from tinsmith_sampler.sglang.distant_memory import Opened, ServerMemory, opened
from tinsmith_sampler.sglang.engine import SglangEngine
from tinsmith_sampler.sglang.failures import SglangAborted, SglangError, SglangGone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tinsmith_sampler.engine import Generated, Row, Scored, Scoring
    from tinsmith_sampler.sglang.adapters import HeldAdapter
    from tinsmith_sampler.sglang.client import SglangClient
    from tinsmith_sampler.whole_engine import Pause

T = TypeVar("T")

LOOK_S = 1.0  # between two looks whether the server was started anew


class SglangWholeEngine(SglangEngine):
    """See ``tinsmith_sampler.whole_engine.Whole``."""

    keeps_folder = True  # a start after a crash reads it again
    patience_s = 600.0  # such a start takes minutes

    _there: Opened | None = None  # the start whose weights can be written
    _written: SglangClient | None = None  # the start that has what was written
    _lost: Callable[[], None] | None = None  # of the receiver; None: nobody writes
    _looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """As the engine's, with weights that can be written."""
        await super().start()
        try:
            await self._current()
        except BaseException as problem:
            await self.close()
            if isinstance(problem, SglangError):
                raise StartupError(f"sglang: its weights cannot be reached: {problem}") from problem
            raise

    async def generate(self, row: Row) -> Generated:
        """Draw one continuation."""
        return await super().generate(replace(row, adapter=None))

    async def score(self, asked: Scoring) -> Scored:
        """Score a prompt."""
        return await super().score(replace(asked, adapter=None))

    def memory(self, pause: Pause, lost: Callable[[], None]) -> ServerMemory:
        """See ``Whole``."""
        if self._there is None:
            raise StartupError("sglang: the engine was not started")
        self._lost = lost
        self._looking = asyncio.create_task(self._look(), name="sglang weights")
        written = partial(setattr, self, "_written")
        return ServerMemory(self._there, self._current, written, pause)

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """The server computes nothing; what it was still doing is computed anew afterwards."""
        try:
            client = await self._running.client()
            await client.pause("retract")
        except SglangError as problem:
            raise WrongBits(f"the server failed when it was to pause: {problem}") from problem
        try:
            yield
        except BaseException:
            with suppress(SglangError):
                await client.resume()
            raise
        try:
            await client.resume()
        except SglangError as problem:
            raise WrongBits(f"the server failed when it was to go on: {problem}") from problem

    async def close(self) -> None:
        """End the server."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await super().close()

    async def _until_answered(
        self,
        adapter: HeldAdapter | None,
        work: Callable[[SglangClient, str | None], Awaitable[T]],
    ) -> T:
        if self._lost is None:
            return await super()._until_answered(adapter, work)
        client = await self._running.client()
        if client is not self._written:
            self._lost()
            raise VersionUnmet("weights: the server was started anew; send the request again")
        try:
            return await work(client, None)
        except SglangGone as problem:
            if client is self._written:  # who asks again waits until one is written and proven
                self._written = None
                self._lost()
            raise VersionUnmet(
                f"weights: the server failed ({problem}), and has to be written anew; "
                "send the request again"
            ) from problem
        except SglangAborted as problem:
            raise VersionUnmet(f"weights: {problem}; send the request again") from problem

    async def _look(self) -> None:
        """Tell of a start that has the folder's weights, before anybody asks for something."""
        while True:
            client = await self._running.client()
            if self._written is not None and client is not self._written and self._lost is not None:
                self._lost()
            await asyncio.sleep(LOOK_S)

    async def _current(self) -> Opened:
        """The server of the moment, once its weights can be written."""
        client = await self._running.client()
        if self._there is None or self._there.client is not client:
            self._there = await opened(client)
        return self._there

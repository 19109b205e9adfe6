"""Which weights are held in memory: the least recently used ones make room, unless in use.

Everything happens on one event loop, so nothing changes hands between two awaits; an adapter is
pinned before the first await that would let another caller evict it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Files = TypeVar("Files", contravariant=True)
F = TypeVar("F")


class Loader(Protocol[Files]):
    """What holds the weights: an engine its adapters, or ``WholeModels`` theirs."""

    async def load_adapter(self, version: str, files: Files) -> None:
        """Make the weights usable."""

    async def unload_adapter(self, version: str) -> None:
        """Let them go."""


class _Resident:
    """One adapter that is loaded or on its way."""

    def __init__(self) -> None:
        self.pins = 0
        self.is_loaded = False
        self.failure: Exception | None = None
        self.loading = asyncio.Lock()  # whoever comes second waits for the first one's load


class Residency(Generic[F]):
    """Loads adapters into an engine when they are asked for, and at most ``limit`` of them."""

    def __init__(self, engine: Loader[F], limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # least recently used first
        self._admission = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def versions(self) -> tuple[str, ...]:
        """What is loaded, the least recently used first."""
        return tuple(version for version, one in self._residents.items() if one.is_loaded)

    @asynccontextmanager
    async def hold(self, version: str, fetch: Callable[[], Awaitable[F]]) -> AsyncIterator[None]:
        """Inside the block the engine has this adapter; ``fetch`` gives its files if need be.

        Waits while ``limit`` other adapters are all in use. A failure to fetch or load reaches
        every caller that waits for this version, and leaves nothing behind.
        """
        known = version in self._residents
        resident = self._pin(version) if known else await self._admit(version)
        try:
            async with resident.loading:
                await self._load(version, resident, fetch)
            yield
        finally:
            self._unpin(version, resident)

    async def _admit(self, version: str) -> _Resident:
        async with self._admission:
            while version not in self._residents and len(self._residents) >= self._limit:
                if not await self._evict():
                    self._freed.clear()
                    await self._freed.wait()
            return self._pin(version)

    async def _evict(self) -> bool:
        """Unload the adapter unused for longest; False when all are in use."""
        for version, resident in self._residents.items():
            if resident.pins == 0:
                del self._residents[version]
                metrics.ADAPTERS.dec()
                metrics.ADAPTER_EVICTIONS.inc()
                await self._engine.unload_adapter(version)
                return True
        return False

    async def _load(
        self, version: str, resident: _Resident, fetch: Callable[[], Awaitable[F]]
    ) -> None:
        if resident.failure is not None:
            raise resident.failure
        if resident.is_loaded:
            return
        try:
            with metrics.ADAPTER_LOAD_SECONDS.time():
                await self._engine.load_adapter(version, await fetch())
        except Exception as failure:
            metrics.ADAPTER_LOADS.labels("failed").inc()
            resident.failure = failure
            self._forget(version, resident)  # the next caller tries anew
            raise
        resident.is_loaded = True
        metrics.ADAPTER_LOADS.labels("done").inc()
        metrics.ADAPTERS.inc()

    def _pin(self, version: str) -> _Resident:
        resident = self._residents.setdefault(version, _Resident())
        resident.pins += 1
        self._residents.move_to_end(version)
        return resident

    def _unpin(self, version: str, resident: _Resident) -> None:
        resident.pins -= 1
        if resident.pins == 0 and not resident.is_loaded:
            self._forget(version, resident)
        self._freed.set()

    def _forget(self, version: str, resident: _Resident) -> None:
        if self._residents.get(version) is resident:
            del self._residents[version]

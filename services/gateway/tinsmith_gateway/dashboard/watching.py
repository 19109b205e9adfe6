"""The installation as the dashboard knows it: looked at when somebody asks, for all who ask."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from tinsmith.bus.views import View
from tinsmith.messages.table import LINEAGES, SERVICE_ALIVE, WEIGHTS_STATUS
from tinsmith.overview import Known, tell
from tinsmith.overview.known import Measured, Registry, is_live
from tinsmith.overview.telling import QUEUES
from tinsmith_gateway.dashboard.pace import Pace

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.messages.registry import Run
    from tinsmith.overview import Overview
    from tinsmith_gateway.registry import Registry as Tables

FRESH_S = 1.5
"""What was looked at a moment ago is told again."""
MAX_RUNS = 200
"""Live runs whose logs are looked at, the newest first."""
AT_A_TIME = 16


class Watching:
    """One gateway's; asks the broker nothing while nobody looks at the dashboard."""

    def __init__(self, bus: Bus, tables: Tables) -> None:
        self.pace = Pace(bus)
        self._bus = bus
        self._tables = tables
        self._known = Known()
        self._heads = View(bus.table(LINEAGES), lambda head: head.lineage_id)
        self._following = AsyncExitStack()
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        self._overview: Overview | None = None

    async def start(self) -> None:
        """Hears of services and of replicas of weights."""
        for subscription in (
            await self._bus.listen(SERVICE_ALIVE, self._known.pings.hear),
            await self._bus.listen(WEIGHTS_STATUS, self._known.roll.hear),
            await self._heads.watch(),
        ):
            self._following.push_async_callback(subscription.close)

    async def close(self) -> None:
        """The opposite of ``start``."""
        await self._following.aclose()

    async def look(self) -> Overview:
        """Everything, of every owner, and of runs that are over too: not for a client as it is.

        Raises:
            BrokerUnavailable: the broker is away.
        """
        async with self._looking:
            if self._overview is None or time.monotonic() - self._looked_at > FRESH_S:
                self._overview = await self._look()
                self._looked_at = time.monotonic()
            return self._overview

    async def _look(self) -> Overview:
        known, tables = self._known, self._tables
        known.registry = Registry(
            sessions=tables.sessions.entries(),
            runs=tables.runs.entries(),
            served=tables.served.entries(),
            checkpoints=tables.checkpoints.entries(),
            heads=self._heads.entries(),
            keys=tables.api_keys.entries(),
        )
        live = [run for run in known.registry.runs.values() if is_live(run, known.registry)]
        live.sort(key=lambda run: run.created_ns, reverse=True)
        known.measured = await self._measure(live[:MAX_RUNS])
        now_s = time.time()
        await self.pace.read(now_s)
        return tell(known, at_s=now_s, has_ended=True)

    async def _measure(self, runs: list[Run]) -> Measured:
        """The part of ``overview.measure`` that the role of a gateway may ask for."""
        found, limit = Measured(), asyncio.Semaphore(AT_A_TIME)

        async def read(model_id: str) -> None:
            async with limit:
                if (last := await self._bus.books.last_op(model_id)) is not None:
                    found.last_ops[model_id] = last
                if (owner := await self._bus.log.owner(model_id)) is not None:
                    found.owners[model_id] = owner.trainer_id

        # Not a group of tasks: its error would be a group, too, and no answer to a client.
        await asyncio.gather(*(read(run.model_id) for run in runs))
        for queue in QUEUES.values():
            state = await self._bus.books.stream(queue.stream)
            if state is not None:
                found.streams.append(state)
                if state.messages:
                    found.subjects[queue.stream] = await self._bus.subjects(queue)
        return found

"""Counts what was used, from what is stored: tokens, saves, and the room that checkpoints take.

Facts are read in order and added to the hour and the account that they belong to. Each such
entry says up to which fact it counts, so that several meters, or one that is started again, count
every fact once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.messages import table
from tinsmith.messages.registry import MeterMark
from tinsmith_checkpointer.metering import (
    HOUR_S,
    NS,
    Account,
    key_of,
    with_sampling,
    with_storage,
    with_training,
)
from tinsmith_checkpointer.rounds import keep_going_round

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from structlog.stdlib import BoundLogger

    from tinsmith.bus import Bus
    from tinsmith.bus.facts import Fact
    from tinsmith.messages.registry import Usage

BATCH = 1000  # facts between two notes of how far the meter has read


class Meter:
    """Any number may run."""

    def __init__(self, bus: Bus, logger: BoundLogger, *, every_s: float) -> None:
        self._facts = bus.facts
        self._log = logger
        self._every_s = every_s
        self._usage = bus.table(table.USAGE)
        self._marks = bus.table(table.METER)
        self._runs = View(bus.table(table.RUNS), lambda _: "")
        self._samplers = View(bus.table(table.SAMPLERS), lambda _: "")
        self._checkpoints = View(bus.table(table.CHECKPOINTS), lambda entry: entry.model_id)

    async def run(self) -> None:
        """Until cancelled."""
        views = (self._runs, self._samplers, self._checkpoints)
        watches = (view.watch for view in views)
        await keep_going_round(self.count, watches, self._log, every_s=self._every_s)

    async def count(self) -> None:
        """Everything up to now."""
        await self._count("log", self._facts.of_log, self._of_model, with_training)
        await self._count("result", self._facts.of_results, self._of_sampler, with_sampling)
        now_ns = time.time_ns()
        this_hour = now_ns // (HOUR_S * NS)
        for model_id in {checkpoint.model_id for checkpoint in self._checkpoints}:
            if (account := await self._of_model(model_id)) is not None:
                for hour in (this_hour - 1, this_hour):
                    await self._count_storage(hour, account, now_ns)

    async def _count(
        self,
        name: str,
        read: Callable[..., AsyncIterator[Fact]],
        account_of: Callable[[str], AsyncAccount],
        add: Callable[..., Usage],
    ) -> None:
        mark = await self._marks.get(name)
        batch: list[Fact] = []
        async for fact in read(first=1 if mark is None else mark.stream_seq + 1):
            batch.append(fact)
            if len(batch) == BATCH:
                await self._add(name, batch, account_of, add)
                batch = []
        if batch:
            await self._add(name, batch, account_of, add)

    async def _add(
        self,
        name: str,
        batch: list[Fact],
        account_of: Callable[[str], AsyncAccount],
        add: Callable[..., Usage],
    ) -> None:
        through = batch[-1].stream_seq
        entries: dict[tuple[int, Account], list[Fact]] = defaultdict(list)
        for fact in batch:
            if (account := await account_of(fact.target)) is not None:
                entries[int(fact.at_s // HOUR_S), account].append(fact)
        for (hour, account), facts in entries.items():
            empty = account.empty(hour)
            change = partial(_added, add=partial(add, facts=facts, through=through), empty=empty)
            await self._usage.update(key_of(hour, account), change)
        await self._marks.put(name, MeterMark(stream_seq=through))

    async def _count_storage(self, hour: int, account: Account, now_ns: int) -> None:
        kept = self._checkpoints.group(account.target)
        key = key_of(hour, account)

        def counted(used: Usage | None) -> Usage | None:
            now = with_storage(used or account.empty(hour), kept, now_ns=now_ns)
            return None if used is None and not now.byte_seconds else now

        await self._usage.update(key, counted)

    async def _of_model(self, model_id: str) -> Account | None:
        run = await self._runs.get(ids.token(model_id))
        if run is None:
            return None
        return Account(model_id, run.owner, run.session_id, run.base_model)

    async def _of_sampler(self, sampler_id: str) -> Account | None:
        sampler = await self._samplers.get(ids.token(sampler_id))
        if sampler is None:
            return None
        return Account(sampler.session_id, sampler.owner, sampler.session_id, sampler.base_model)


def _added(used: Usage | None, *, add: Callable[[Usage], Usage], empty: Usage) -> Usage:
    return add(used or empty)


if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    AsyncAccount = Coroutine[Any, Any, Account | None]

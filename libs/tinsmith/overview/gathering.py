"""Listening and looking: everything that is known of a running installation.

A gateway that has the registry in memory already may make a ``Known`` of it and use
``measure`` and ``telling.tell`` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from tinsmith.errors import BrokerUnavailable, NotFound
from tinsmith.messages import table
from tinsmith.messages.base import Message
from tinsmith.overview.known import Known, Measured, is_live
from tinsmith.overview.telling import QUEUES, tell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
    from typing import Any

    from tinsmith.bus import Bus
    from tinsmith.messages.table import Entity
    from tinsmith.overview.facts import Overview

M = TypeVar("M", bound=Message)

LISTEN_S = 2.5
"""Services say every two seconds that they live."""
READ_S = 20.0
"""For one table of the registry, or for the logs of all runs that are looked at."""
AT_A_TIME = 16
NO_REGISTRY = "the broker has no registry: no service of Tinsmith has run against it yet"


async def gather(bus: Bus, patience_s: float = LISTEN_S, *, has_ended: bool = False) -> Overview:
    """Listen for ``patience_s``, look, and tell; with ``has_ended`` of runs that are over, too.

    What the broker does not tell this user, or not in time, is named in ``unknown``.

    Raises:
        BrokerUnavailable: the broker went away.
    """
    async with watching(bus) as watch:
        await asyncio.sleep(patience_s)
        return await watch.look(has_ended=has_ended)


@asynccontextmanager
async def watching(bus: Bus) -> AsyncIterator[Watch]:
    """Follow pings and registry while the block lasts; a look needs no waiting any more."""
    watch = Watch(bus)
    async with contextlib.AsyncExitStack() as stack:
        pings = await bus.listen(table.SERVICE_ALIVE, watch.known.pings.hear)
        stack.push_async_callback(pings.close)
        statuses = await bus.listen(table.WEIGHTS_STATUS, watch.known.roll.hear)
        stack.push_async_callback(statuses.close)
        await watch.follow_registry(stack)
        yield watch


class Watch:
    """What is known of an installation, kept current. Made by ``watching``."""

    def __init__(self, bus: Bus) -> None:
        self.known = Known()
        """Of this moment, but for what is measured: that is of the last look."""
        self._bus = bus
        self._unread: list[str] = []

    async def follow_registry(self, stack: contextlib.AsyncExitStack) -> None:
        """Keep the registry in memory until ``stack`` is closed."""
        try:
            if await self._bus.books.stream(table.REGISTRY_STREAM) is None:
                self._unread.append(NO_REGISTRY)
                return
        except BrokerUnavailable as error:
            self._unread.append(str(error))
            return
        registry = self.known.registry
        await asyncio.gather(
            self._follow(stack, table.SESSIONS, registry.sessions),
            self._follow(stack, table.RUNS, registry.runs),
            self._follow(stack, table.SERVED, registry.served),
            self._follow(stack, table.CHECKPOINTS, registry.checkpoints),
            self._follow(stack, table.LINEAGES, registry.heads),
            self._follow(stack, table.API_KEYS, registry.keys),
        )

    async def look(
        self, *, has_ended: bool = False, on_log: Callable[[], None] | None = None
    ) -> Overview:
        """Measure, and tell everything; raises as ``gather``. ``on_log``: one more log was read."""
        self.known.measured = await measure(
            self._bus, self.known, has_ended=has_ended, on_log=on_log
        )
        self.known.measured.unknown[:0] = self._unread
        return tell(self.known, at_s=time.time(), has_ended=has_ended)

    async def _follow(
        self, stack: contextlib.AsyncExitStack, entity: Entity[M], entries: dict[str, M]
    ) -> None:
        def note(key: str, value: M | None) -> None:
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value

        try:
            async with asyncio.timeout(READ_S):
                followed = await self._bus.table(entity).watch(note)
        except TimeoutError:
            self._unread.append(f"the registry's {entity.doc} were not told in {READ_S:g} s")
        else:
            stack.push_async_callback(followed.close)


async def measure(
    bus: Bus,
    known: Known,
    *,
    has_ended: bool = False,
    on_log: Callable[[], None] | None = None,
) -> Measured:
    """Ask the broker, and the logs of the runs that are live, or of all.

    Raises:
        BrokerUnavailable: the broker went away.
    """
    found = Measured()

    async def broker() -> None:
        found.broker = await bus.books.broker()

    async def stream(name: str) -> None:
        state = await bus.books.stream(name)
        if state is not None:
            found.streams.append(state)

    async def subjects(queue: table.Queue[Any]) -> None:
        found.subjects[queue.stream] = await bus.subjects(queue)

    await _all(found, [broker(), *(stream(name) for name in table.STREAMS)])
    order = list(table.STREAMS)
    found.streams.sort(key=lambda state: order.index(state.name))
    there = {state.name for state in found.streams if state.messages}
    await _all(found, [subjects(queue) for queue in QUEUES.values() if queue.stream in there])
    runs = [
        run.model_id
        for run in known.registry.runs.values()
        if has_ended or is_live(run, known.registry)
    ]
    if table.LOG_STREAM in there:
        await _read_logs(bus, runs, found, on_log)
    return found


async def _all(found: Measured, parts: Iterable[Coroutine[None, None, None]]) -> None:
    """Ask for all at once; what is refused is noted."""
    for outcome in await asyncio.gather(*parts, return_exceptions=True):
        if isinstance(outcome, BrokerUnavailable | NotFound):
            found.unknown.append(str(outcome))
        elif outcome is not None:
            raise outcome


async def _read_logs(
    bus: Bus, model_ids: list[str], found: Measured, on_log: Callable[[], None] | None
) -> None:
    """Who took each model last, and what was committed last."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def read(model_id: str) -> None:
        async with limit:
            if (last := await bus.books.last_op(model_id)) is not None:
                found.last_ops[model_id] = last
            if (owner := await bus.log.owner(model_id)) is not None:
                found.owners[model_id] = owner.trainer_id
            if on_log is not None:
                on_log()

    try:
        async with asyncio.timeout(READ_S):
            await _all(found, map(read, model_ids))
    except TimeoutError:
        done = len(found.last_ops)
        found.unknown.append(
            f"the logs of {len(model_ids)} runs were not read in {READ_S:g} s, those of {done} were"
        )

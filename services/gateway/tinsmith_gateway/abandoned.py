"""Samples that nobody waits for any more: those of sessions that have ended.

A session may end at another gateway, or because its client has died, and whoever ended it may die
as well. So every gateway looks at all that is queued, every so often, and soon after it has ended
a session itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from tinsmith import ids
from tinsmith.errors import ServerError
from tinsmith.messages.base import Failed
from tinsmith_gateway.cancelling import cancel_sample
from tinsmith_gateway.waiters import wait_for

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith_gateway.models import Models
    from tinsmith_gateway.registry import Registry
    from tinsmith_gateway.sessions import Sessions
    from tinsmith_gateway.unfinished import Unfinished

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 10.0
AT_ONCE = 16
_OVER = Failed(category="user", message="cancelled: its session has ended")


class Abandoned:
    """Finds and cancels them; the count of what is unfinished is corrected on the way."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        models: Models,
        sessions: Sessions,
        unfinished: Unfinished,
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._models = models
        self._sessions = sessions
        self._unfinished = unfinished

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await wait_for(self._sessions.some_ended, LOOK_EVERY_S)
            self._sessions.some_ended.clear()
            try:
                await self.cancel()
            except ServerError as error:
                log.warning("queues not looked at", error=str(error))

    async def cancel(self) -> None:
        """Ends what is queued, held or running of sessions that are over."""
        queued = await self._unfinished.look()
        over = [one for one in queued.sampling | queued.held if self._is_over(one)]
        slots = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for request_id in over:
                tasks.create_task(self._cancel(request_id, slots), name=f"cancel {request_id}")
        if over:
            log.info("samples cancelled whose sessions have ended", count=len(over))

    def _is_over(self, request_id: str) -> bool:
        session = self._registry.session_now(ids.session_of(request_id))
        return session is not None and session.status != "active"

    async def _cancel(self, request_id: str, slots: asyncio.Semaphore) -> None:
        future = ids.parse_future_id(request_id)
        sampler = self._registry.samplers.peek(ids.token(future.target))
        if sampler is None:  # not heard of yet
            return
        base_model = self._models.resolve_sampled(sampler.base_model)
        async with slots:
            try:
                await cancel_sample(
                    self._bus,
                    base_model,
                    sampler.sampler_id,
                    future.seq,
                    owner=sampler.owner,
                    why=_OVER,
                )
            except ServerError as error:  # the next look finds it again
                log.warning("sample not cancelled", request_id=request_id, error=str(error))

"""Samples over their owner's share: on a queue of their own, and let go as others are done.

They are promised like all others, so what holds them must outlive this process. Every gateway
lets go what it finds room for, whoever has held it; that two of them do so at once does no harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tinsmith import ids
from tinsmith.errors import Busy, ServerError
from tinsmith.messages.table import HELD, SAMPLES
from tinsmith_gateway.waiters import wait_for
from tinsmith_gateway.whereabouts import held_tokens

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.messages.sampling import Sample
    from tinsmith_gateway.routing import Routing
    from tinsmith_gateway.unfinished import Unfinished

log = structlog.get_logger(__name__)

RECHECK_S = 2.0  # in case it was not heard that something is done


class Holding:
    """Takes samples in."""

    def __init__(self, bus: Bus, unfinished: Unfinished, routing: Routing) -> None:
        self._bus = bus
        self._routing = routing
        self._unfinished = unfinished

    async def send(self, owner: str, sample: Sample) -> None:
        """To the samplers, or to wait until its owner has fewer there.

        Raises Busy when the queue is full, or its owner has too much that is not done.
        """
        tokens = self._routing.tokens(owner, sample)
        if await self._unfinished.admit(owner, sample.sampler_id, sample.seq):
            await self._bus.enqueue(HELD, sample, **held_tokens(owner, tokens))
            self._unfinished.has_room.set()  # there may be, since it was admitted
        else:
            await self._bus.enqueue(SAMPLES, sample, **tokens)
        log.debug("sample queued", request_id=sample.request_id)
        self._unfinished.arrived(sample.request_id)

    async def run(self) -> None:
        """Lets go what there is room for; runs until cancelled."""
        while True:
            self._unfinished.has_room.clear()
            for owner in self._unfinished.owners_with_room():
                try:
                    await self._let_go(owner)
                except (Busy, ServerError) as error:
                    log.warning("samples are held on", owner=owner, error=str(error))
            await wait_for(self._unfinished.has_room, RECHECK_S)

    async def _let_go(self, owner: str) -> None:
        while self._unfinished.has_room_for(owner):
            anything = {"pool": "*", "share": "*", "sampler": "*", "seq": "*"}
            moved = await self._bus.move_first(HELD, SAMPLES, owner=owner, **anything)
            if moved is None:  # not there yet, or no longer: the next look at the queues tells
                return
            request_id = ids.future_id(ids.of_token(moved["sampler"]), int(moved["seq"]))
            await self._unfinished.let_go(request_id, owner)

"""The models in this trainer's hands, and the placement by which it holds each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.bus import Delivery
    from tinsmith.messages.ops import Placement


class Held:
    """One model, until its placement is finished by exactly one of ack, give_back, let_go."""

    def __init__(self, placement: Delivery[Placement], leave: Callable[[], None]) -> None:
        self.model_id = placement.message.model_id
        self._placement = placement
        self._leave = leave

    def renew(self, placement: Delivery[Placement]) -> None:
        """Hold it by ``placement``, a redelivery, from now on."""
        self._placement.let_go()
        self._placement = placement

    async def ack(self) -> None:
        """Its session is over."""
        self._leave()
        await self._placement.ack()

    async def give_back(self, delay_s: float = 0.0) -> None:
        """Another trainer, or this one, shall take it after ``delay_s``."""
        self._leave()
        await self._placement.give_back(delay_s=delay_s)

    def let_go(self) -> None:
        """Another trainer has it."""
        self._leave()
        self._placement.let_go()


class Holdings:
    """All models held, up to a limit; ``load`` tells how many, and how many more may come."""

    def __init__(self, limit: int, load: dict[str, float]) -> None:
        self._limit = limit
        self._load = load
        self._held: dict[str, Held] = {}
        self._has_room = asyncio.Event()
        self._changed()

    async def room(self) -> None:
        """Wait until one more model can be held."""
        await self._has_room.wait()

    def take(self, placement: Delivery[Placement]) -> Held | None:
        """The model as a new one; None when it is held already.

        The broker delivers a placement again to its own holder when it could not hear of it for
        some time. Taking the model twice would fence ourselves.
        """
        model_id = placement.message.model_id
        if (held := self._held.get(model_id)) is not None:
            held.renew(placement)
            return None
        held = self._held[model_id] = Held(placement, lambda: self._left(model_id))
        self._changed()
        return held

    def _left(self, model_id: str) -> None:
        del self._held[model_id]
        self._changed()

    def _changed(self) -> None:
        room = self._limit - len(self._held)
        self._load |= {"models": len(self._held), "room": room}
        metrics.MODELS.set(len(self._held))
        metrics.ROOM.set(room)
        if room > 0:
            self._has_room.set()
        else:
            self._has_room.clear()

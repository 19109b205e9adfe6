"""What the routes of OpenAI's API need beside the rest of a gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith_gateway.openai.guests import Guests
from tinsmith_gateway.openai.inbox import Inbox
from tinsmith_gateway.openai.texts import Texts

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith_gateway.registry import Registry
    from tinsmith_gateway.sessions import Sessions


class Desk:
    """Its parts; nothing in here is missed by another gateway."""

    def __init__(self, bus: Bus, registry: Registry, sessions: Sessions) -> None:
        self.guests = Guests(registry, sessions)
        self.inbox = Inbox(bus)
        self.texts = Texts(bus)

    async def start(self) -> None:
        """Listens to samplers."""
        await self.inbox.start()

    async def close(self) -> None:
        """The opposite of ``start``."""
        await self.inbox.close()

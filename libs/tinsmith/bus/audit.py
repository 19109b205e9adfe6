"""The trail of what owners did to their things, kept for more than a year, read by day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tinsmith.bus.history import kept
from tinsmith.bus.wire import publish
from tinsmith.messages.base import decoder, encode
from tinsmith.messages.services import AuditEntry
from tinsmith.messages.table import AUDIT_STREAM, AUDIT_TEMPLATE

if TYPE_CHECKING:
    from datetime import date

    from nats.aio.client import Client
    from nats.js import JetStreamContext

_ENTRIES = decoder(AuditEntry)


class AuditTrail:
    """Entries of all owners."""

    def __init__(self, connection: tuple[Client, JetStreamContext]) -> None:
        self._connection = connection

    async def add(self, entry: AuditEntry) -> None:
        """Append ``entry``. Raises BrokerUnavailable or StorageFull."""
        day = datetime.fromtimestamp(entry.at_ns / 1e9, UTC).date()
        await publish(
            self._connection, _subject(entry.owner, day, entry.topic), encode(entry), headers=None
        )

    async def of_day(self, owner: str, day: date, topic: str = "*") -> list[AuditEntry]:
        """The entries of one owner and day (UTC), oldest first; ``topic`` may be ``*``."""
        subject = _subject(owner, day, topic)
        found = kept(self._connection, AUDIT_STREAM, subject)
        return [_ENTRIES.decode(msg.data) async for msg in found]


def _subject(owner: str, day: date, topic: str) -> str:
    return AUDIT_TEMPLATE.subject(owner=owner, day=f"{day:%Y%m%d}", topic=topic)

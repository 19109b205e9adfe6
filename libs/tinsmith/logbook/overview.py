"""One row per run: what its log comes to, as far as its newest entries tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.errors import Forgotten
from tinsmith.logbook.contents import seal_of
from tinsmith.logbook.entry import LogDamaged
from tinsmith.messages.ops import Owned, Record

if TYPE_CHECKING:
    from tinsmith.errors import TinsmithError
    from tinsmith.logbook.entry import Entry
    from tinsmith.logbook.source import Logbook


@dataclass
class Overview:
    """What is known of a run from the newest entry of each kind: nothing else is read."""

    model_id: str
    base_model: str = ""  # as its last owner told
    last_op: int | None = None
    owners: int = 0  # one after the other
    head_blake3: str = ""
    closed: str = ""
    """``sealed`` or ``forgotten`` if its contents cannot be read here."""
    damage: str = ""
    """Why its entries cannot be read."""

    def add(self, found: Entry) -> None:
        """The newest entry of some kind; the newest of all comes last."""
        entry = found.entry
        self.head_blake3 = found.blake3
        if isinstance(entry, Owned):
            self.owners = entry.epoch
            self.base_model = entry.environment.get("base_model", "")
        elif isinstance(entry, Record):
            self.last_op = entry.seq


async def overview(logbook: Logbook, model_id: str) -> Overview:
    """The row of one run. Nothing is verified."""
    row = Overview(model_id)
    try:
        for found in await logbook.newest(model_id):
            row.add(found)
            if isinstance(found.entry, Record):
                why_closed = (await seal_of(logbook, found.entry)).why_closed
                row.closed = "" if why_closed is None else _closed(why_closed)
    except LogDamaged as exc:
        row.damage = str(exc)
    return row


def _closed(why: TinsmithError) -> str:
    return "forgotten" if isinstance(why, Forgotten) else "sealed"

"""When a lineage gets what beside its deltas, and what of it may be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinsmith.messages.weights import WeightsStored


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Of one publisher."""

    full_below_bytes: int = 8 << 20
    """A state that is smaller goes as a whole every time: most adapters are."""
    full_every: int = 64
    """Versions after which a whole state is due, for who joins late."""
    full_share: float = 0.5
    """It is due earlier when deltas since the last one exceed this share of it."""
    fold: int = 8
    """So many deltas are folded to one, and so many of those again; below 2: none are."""
    keep_full: int = 2
    """Whole states whose chunks are kept, with all that follows the oldest of them."""

    def is_full_due(self, *, versions: int, delta_bytes: int, full_bytes: int) -> bool:
        """After ``versions`` deltas of ``delta_bytes`` together since the last whole state."""
        return versions >= self.full_every or delta_bytes > self.full_share * full_bytes


def kept_from(
    stored: Sequence[WeightsStored], *, keep_full: int, live: Iterable[int] = ()
) -> int | None:
    """The stream sequence below which no chunk is needed any more; None: all are.

    ``stored`` are a lineage's entries in order, ``live`` the versions that receivers serve. The
    newest ``keep_full`` whole states stay, with every way on from the oldest of them, and every
    way on from what a live receiver serves.
    """
    fulls = sorted({entry.version for entry in stored if entry.form == "full"})
    if len(fulls) < keep_full:
        return None
    oldest = fulls[-keep_full]
    behind = min((version for version in live if version), default=oldest)
    needed = [
        entry.first_chunk
        for entry in stored
        if entry.version > min(oldest, behind) or (entry.form == "full" and entry.version == oldest)
    ]
    return min(needed)

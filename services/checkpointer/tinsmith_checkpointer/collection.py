"""Compares what the blob store has with what needs it, and frees the rest.

The sweep frees what was noted to have ended. Here is found what no note tells of: parts of saves
that were refused or whose trainer died, ciphertexts of an encryption that broke off, results that
have been fetched, requests of samples that left their log. A blob is freed when nothing refers to
it and nobody has put it for a grace, in which whoever put it has named it if it ever does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tinsmith.bus.views import View
from tinsmith.messages import table
from tinsmith.messages.base import BlobRef
from tinsmith_checkpointer.references import Need, entries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.blobs import BlobStore, Stored
    from tinsmith.bus import Bus
    from tinsmith.messages.checkpoints import Discarded
    from tinsmith_checkpointer.references import References

Fate = Need | Literal["discarded", "fresh", "ended", "orphans"]
"""Why a blob is kept, or what is freed."""
MAX_WRITE_S = 3600.0  # who has written a blob for longer has died
FREED: tuple[Fate, ...] = ("ended", "orphans")


@dataclass
class Plan:
    """What is to become of each blob that there was when it was made."""

    blobs: dict[Fate, list[BlobRef]] = field(default_factory=dict)
    leftover_bytes: int = 0

    def of(self, *fates: Fate) -> list[BlobRef]:
        """The blobs with one of these fates."""
        return [ref for fate in fates for ref in self.blobs.get(fate, ())]


class Collection:
    """Several may go on at the same time: a blob is freed once."""

    def __init__(
        self, bus: Bus, blobs: BlobStore, references: References, *, grace_s: float
    ) -> None:
        self._discarded = bus.table(table.DISCARDED)
        self._blobs = blobs
        self._references = references
        self._grace_s = grace_s

    async def plan(self) -> Plan:
        """What there is and what it is for; nothing is changed.

        Raises:
            ServerError: something could not be read, so that nothing can be said.
        """
        stored = await self._blobs.stored()  # first: what is put meanwhile is not looked at
        needed = await self._references.now()
        # Later, since a note is there before what it is about loses its reference.
        notes: View[Discarded] = View(self._discarded, lambda _: "")
        discarded = _lately(await entries(notes))
        made = Plan(leftover_bytes=await self._leftovers(remove=False))
        for blob in stored:
            fate = fate_of(blob, needed, discarded, before_s=time.time() - self._grace_s)
            made.blobs.setdefault(fate, []).append(BlobRef(blob.blake3, blob.size))
        return made

    async def carry_out(self, made: Plan) -> int:
        """Free what the plan says, unless it was put meanwhile; how many bytes that was.

        Raises:
            ServerError: something could not be deleted; what was not reached stays.
        """
        freed = await self._leftovers(remove=True)
        for ref in made.of(*FREED):
            if await self._blobs.free(ref, unused_s=self._grace_s):
                freed += ref.size
        return freed

    async def _leftovers(self, *, remove: bool) -> int:
        older_s = max(self._grace_s, MAX_WRITE_S)
        return await self._blobs.leftovers(older_s=older_s, remove=remove)


def fate_of(
    blob: Stored, needed: Mapping[str, Need], discarded: Mapping[str, int], *, before_s: float
) -> Fate:
    """What is to become of a blob; ``before_s`` is the unix time at which a grace began.

    ``discarded`` are the moments in ns at which blobs lost their last reference that was noted.
    """
    if (need := needed.get(blob.blake3)) is not None:
        return need
    ended_ns = discarded.get(blob.blake3)
    if ended_ns is not None and ended_ns > before_s * 1e9:
        return "discarded"
    if blob.used_s > before_s:
        return "fresh"
    return "orphans" if ended_ns is None else "ended"


def _lately(notes: list[Discarded]) -> dict[str, int]:
    """When each discarded part was discarded last."""
    moments: dict[str, int] = {}
    for note in notes:
        for ref in note.parts.values():
            moments[ref.blake3] = max(note.discarded_ns, moments.get(ref.blake3, 0))
    return moments

"""What was anchored of runs, and whether their logs still have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from tinsmith.logbook.entry import LogDamaged, place_of
from tinsmith.logbook.text import plain
from tinsmith.messages import ops
from tinsmith.messages.anchors import Anchor, Anchored, PrunedLog
from tinsmith.messages.base import GENESIS, decoder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tinsmith.logbook.entry import Entry

_ANCHORS = decoder(Anchor)
_KINDS = {"op": "op {}", "own": "owner of epoch {}", "state": "state after op {}"}


@dataclass
class Chain:
    """All anchors that there are, up to the first that is not as it must be."""

    heads: dict[str, list[Anchored]] = field(default_factory=dict)
    """What was anchored, by run, oldest first."""
    pruned: dict[str, PrunedLog] = field(default_factory=dict)
    """Logs that were said to be taken away, by run."""
    length: int = 0
    through: int = 0
    """Stream sequence of the last log entry that is covered."""
    blake3: str = GENESIS
    """Digest of the last anchor."""
    damage: LogDamaged | None = None

    def of(self, model_id: str) -> Sequence[Anchored]:
        """What was anchored of the run, oldest first."""
        return self.heads.get(model_id, ())

    def add(self, subject: str, data: bytes) -> None:
        """The next anchor, as it is stored; LogDamaged, naming it, when it cannot be the next."""
        place = f"anchor {self.length + 1}"
        try:
            anchor: Anchor = _ANCHORS.decode(data)
        except msgspec.MsgspecError as exc:
            raise LogDamaged(place, "anchor", f"not one that can be read ({exc})") from exc
        told = (anchor.number, subject.rpartition(".")[2])
        if told != (self.length + 1, str(self.length + 1)):
            raise LogDamaged(place, "number", f"{told[0]} is stored as {subject} here")
        if anchor.prev_blake3 != self.blake3:
            problem = f"{anchor.prev_blake3} is not the digest of the anchor before, {self.blake3}"
            raise LogDamaged(place, "prev_blake3", problem)
        if anchor.after not in (0, self.through):  # 0: the log was another one from then on
            problem = f"{anchor.after} is not where the anchor before ended, {self.through}"
            raise LogDamaged(place, "after", problem)
        for entry in anchor.pruned:
            self._check_pruned(entry, place)
        self.length, self.through, self.blake3 = (
            anchor.number, anchor.through, blake3(data).hexdigest()
        )  # fmt: skip
        self._take(anchor)

    def _check_pruned(self, entry: PrunedLog, place: str) -> None:
        """A log is anchored to its end before it is taken away."""
        last = self.of(entry.model_id)[-1:]
        if [one.head.blake3 for one in last] != [entry.head.blake3]:
            where = f"{told(last[0])} has another" if last else "no anchor has any"
            problem = f"the last entry of {entry.model_id} is {entry.head.blake3}, but {where}"
            raise LogDamaged(place, "pruned", problem)

    def _take(self, anchor: Anchor) -> None:
        self.pruned |= {entry.model_id: entry for entry in anchor.pruned}
        for head in anchor.heads:
            anchored = Anchored(
                number=anchor.number,
                time_ns=anchor.time_ns,
                anchor_blake3=self.blake3,
                head=head,
            )
            self.heads.setdefault(head.model_id, []).append(anchored)


async def read_chain(stored: AsyncIterator[tuple[str, bytes]]) -> Chain:
    """The chain in ``stored``, the subjects and bytes of its anchors."""
    chain = Chain()
    async for subject, data in stored:
        try:
            chain.add(subject, data)
        except LogDamaged as exc:
            chain.damage = exc
            break
    return chain


class Expected:
    """The anchored heads of one run, each of which must be an entry of its log."""

    def __init__(self, anchored: Sequence[Anchored]) -> None:
        self._anchored = anchored
        self._missing = {one.head.blake3 for one in anchored}
        self._wanted = {one.head.place for one in anchored}
        self._others: dict[str, tuple[str, str]] = {}  # place: which entry is there, its digest
        self._end = "the log is empty"

    def see(self, entry: Entry, number: int) -> None:
        """``entry`` is the next one, the ``number``-th."""
        self._missing.discard(entry.blake3)
        place = _key(entry.entry)
        if place in self._wanted:
            self._others[place] = (place_of(entry.entry, number), entry.blake3)
        self._end = f"the log ends with {place_of(entry.entry, number)}"

    def require_all(self) -> None:
        """After the last entry: LogDamaged for the first anchored one that did not come."""
        before = ""
        for one in self._anchored:
            if one.head.blake3 in self._missing:
                raise self._damage(one, before)
            before = f"; what {told(one)} has is there, so it was changed behind that"

    def _damage(self, one: Anchored, before: str) -> LogDamaged:
        said = f"{told(one)} has it with the digest {plain(one.head.blake3)}"
        place, digest = self._others.get(one.head.place, ("", ""))
        if place:
            problem = f"its digest is {digest}, but {said}: it was replaced, or one before it was"
        else:
            place = place_in_words(one.head.place)
            problem = f"it is not there, but {said}: {self._end}, so its end was cut off"
        return LogDamaged(place, "anchor", problem + before)


def told(one: Anchored) -> str:
    """Which anchor it was."""
    when = datetime.fromtimestamp(one.time_ns / 1e9, UTC).isoformat(timespec="seconds")
    return f"anchor {one.number} ({when})"


def place_in_words(place: str) -> str:
    """An anchored place as errors name entries."""
    kind, _, number = place.partition(".")
    return plain(_KINDS.get(kind, kind + " {}").format(number))


def _key(entry: ops.LogEntry) -> str:
    match entry:
        case ops.Record():
            return f"op.{entry.seq}"
        case ops.Owned():
            return f"own.{entry.epoch}"
        case ops.StateSaved():
            return f"state.{entry.seq}"

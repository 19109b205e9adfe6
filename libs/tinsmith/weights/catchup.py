"""What a receiver knows of a lineage's chain, and its cheapest way to the newest version."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinsmith.errors import ServerError
from tinsmith.messages.weights import WeightsStored

if TYPE_CHECKING:
    from tinsmith.bus.lineages import Entry

WHOLE_COST = 8
"""A byte of a whole state counts so many of a delta's for who has a state: its pause is longer."""


class BrokenChain(ServerError):
    """An entry does not follow the one before it."""


class _Way(NamedTuple):
    cost: int
    entries: tuple[WeightsStored, ...]


class Chronicle:
    """The entries from some place of the chain on, each one proven to follow the one before."""

    def __init__(self) -> None:
        self.stream_seq = 0
        """Of the last entry."""
        self.epoch = 0
        """Of the newest publisher."""
        self._blake3: str | None = None  # of the last entry; None: the first may be any
        self._stored: list[WeightsStored] = []
        self._lost: set[tuple[str, int, int]] = set()

    @property
    def newest(self) -> int:
        """The newest version; 0: none."""
        return max((entry.version for entry in self._stored), default=0)

    def is_without(self, version: int, root: str) -> bool:
        """Whether the chain has another state in the place of this one, or ends before it."""
        roots = {entry.root for entry in self._stored if entry.version == version}
        return root not in roots if roots else 0 < self.newest < version

    def add(self, entry: Entry) -> None:
        """Take in the next entry; one that was taken in already changes nothing.

        Raises:
            BrokenChain: it does not follow the last one, or comes from a publisher of before.
        """
        if entry.stream_seq <= self.stream_seq:
            return
        message = entry.message
        if self._blake3 not in (None, message.prev_blake3):
            raise BrokenChain(
                f"{message.lineage_id}: entry {entry.stream_seq} follows {message.prev_blake3}, "
                f"not {self._blake3}, which is the one before it"
            )
        if message.epoch < self.epoch:
            raise BrokenChain(
                f"{message.lineage_id}: entry {entry.stream_seq} is of epoch {message.epoch}, "
                f"after one of {self.epoch}"
            )
        self.stream_seq, self.epoch, self._blake3 = entry.stream_seq, message.epoch, entry.blake3
        if isinstance(message, WeightsStored):
            self._stored.append(message)

    def lose(self, stored: WeightsStored) -> None:
        """Never go by this entry again: its chunks are gone, or lead elsewhere."""
        self._lost.add(_key(stored))

    def route(self, version: int, root: str) -> tuple[WeightsStored, ...] | None:
        """The entries that lead from ``version`` (0: nothing) with ``root`` to the newest one.

        None when there is no way; nothing when it is there already.
        """
        ways = {version: _Way(0, ())} if version else {}
        roots = {version: root}
        price = WHOLE_COST if version else 1
        # Deltas lead upwards only, so that one pass in order finds the cheapest way.
        for entry in sorted(self._stored, key=lambda entry: entry.version):
            base = _Way(0, ()) if entry.form == "full" else ways.get(entry.base_version)
            is_apart = entry.form != "full" and roots.get(entry.base_version) != entry.base_root
            if base is None or is_apart or entry.version <= version or _key(entry) in self._lost:
                continue
            cost = base.cost + entry.size * (price if entry.form == "full" else 1)
            known = ways.get(entry.version)
            if known is None or cost < known.cost:
                ways[entry.version] = _Way(cost, (*base.entries, entry))
                roots[entry.version] = entry.root
        found = ways.get(max(self.newest, version))
        return None if found is None else found.entries

    def prune(self, version: int) -> None:
        """Drop what nobody needs who has ``version``, and might have to start anew."""
        fulls = [
            entry.version
            for entry in self._stored
            if entry.form == "full" and _key(entry) not in self._lost
        ]
        first = min(max(fulls, default=0), version)
        self._stored = [entry for entry in self._stored if entry.version >= first]


def _key(entry: WeightsStored) -> tuple[str, int, int]:
    return entry.form, entry.version, entry.first_chunk

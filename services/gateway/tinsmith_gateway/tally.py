"""Requests that are not done, by owner: how many, where they are, and in which order."""

from __future__ import annotations

from bisect import bisect_left
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from tinsmith import ids

if TYPE_CHECKING:
    from collections.abc import Iterator


class Entry(NamedTuple):
    """One request."""

    owner: str
    is_sample: bool
    ticket: int | None  # its place among those of its owner that are held, if it is

    @property
    def is_held(self) -> bool:
        """Whether it is not with the samplers yet."""
        return self.ticket is not None


class _Owned:
    """One owner's."""

    def __init__(self) -> None:
        self.training = 0
        self.sampling = 0  # with the samplers
        self.tickets: list[int] = []  # of what is held, rising

    def __len__(self) -> int:
        return self.training + self.sampling + len(self.tickets)

    def add(self, entry: Entry, step: int) -> None:
        """Counts it once more, or once less with ``step`` -1."""
        if entry.ticket is None and entry.is_sample:
            self.sampling += step
        elif entry.ticket is None:
            self.training += step
        elif step > 0:
            self.tickets.append(entry.ticket)
        else:
            del self.tickets[bisect_left(self.tickets, entry.ticket)]


_NOTHING = _Owned()


class Tally:
    """Counts; forgets whoever has nothing left."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._owned: dict[str, _Owned] = {}
        self._seqs: dict[str, set[int]] = {}  # by model or sampling session
        self._tickets = count()

    def get(self, request_id: str) -> Entry | None:
        """What is counted under this id."""
        return self._entries.get(request_id)

    def request_ids(self) -> set[str]:
        """All there are."""
        return set(self._entries)

    def count(self, owner: str) -> int:
        """All of an owner's."""
        return len(self._of(owner))

    def counts(self) -> dict[str, int]:
        """All of all owners', by where they are."""
        owned = self._owned.values()
        return {
            "training": sum(one.training for one in owned),
            "sampling": sum(one.sampling for one in owned),
            "held": sum(len(one.tickets) for one in owned),
        }

    def sampling(self, owner: str) -> int:
        """Those of an owner that samplers have."""
        return self._of(owner).sampling

    def held(self, owner: str) -> int:
        """Those of an owner that samplers do not have yet."""
        return len(self._of(owner).tickets)

    def holders(self) -> Iterator[str]:
        """Owners of whom something is held."""
        return (owner for owner, owned in self._owned.items() if owned.tickets)

    def ahead(self, entry: Entry) -> int:
        """How many of its owner's are held that came before it."""
        return bisect_left(self._of(entry.owner).tickets, entry.ticket or 0)

    def is_first(self, target: str, seq: int) -> bool:
        """Whether it comes before all that are counted of its target, and there are some."""
        seqs = self._seqs.get(target)
        return seqs is not None and seq < min(seqs)

    def put(self, request_id: str, owner: str, *, is_held: bool) -> None:
        """Counts a request, or moves it; one that stays where it is keeps its place."""
        known = self._entries.get(request_id)
        if known is not None and known.is_held == is_held:
            return
        self.remove(request_id)
        future = ids.parse_future_id(request_id)
        entry = Entry(owner, future.kind == "sample", next(self._tickets) if is_held else None)
        self._entries[request_id] = entry
        self._owned.setdefault(owner, _Owned()).add(entry, 1)
        self._seqs.setdefault(future.target, set()).add(future.seq)

    def remove(self, request_id: str) -> Entry | None:
        """What was counted under this id."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        owned = self._owned[entry.owner]
        owned.add(entry, -1)
        if not owned:
            del self._owned[entry.owner]
        future = ids.parse_future_id(request_id)
        seqs = self._seqs[future.target]
        seqs.discard(future.seq)
        if not seqs:
            del self._seqs[future.target]
        return entry

    def _of(self, owner: str) -> _Owned:
        return self._owned.get(owner, _NOTHING)

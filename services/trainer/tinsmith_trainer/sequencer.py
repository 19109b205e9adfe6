"""Restores the order of one model's ops, whatever order they arrive in. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Sequencer(Generic[T]):
    """Holds what came early until everything before it has come."""

    def __init__(self, next_seq: int) -> None:
        self._next = next_seq
        self._early: dict[int, T] = {}

    @property
    def next_seq(self) -> int:
        """The seq that is waited for: everything below it has been handed out."""
        return self._next

    def is_past(self, seq: int) -> bool:
        """Whether ``seq`` was handed out before."""
        return seq < self._next

    def offer(self, seq: int, item: T) -> list[tuple[int, T]]:
        """Take one arrival; returns what is in order now, lowest seq first.

        A second arrival of a waiting seq replaces the first (it is a redelivery).
        """
        self._early[seq] = item
        ready = []
        while self._next in self._early:
            ready.append((self._next, self._early.pop(self._next)))
            self._next += 1
        return ready

    def abandon(self) -> tuple[int, list[tuple[int, T]]]:
        """Give up on the gap: the missing seq, and what waited for it, up to the next gap."""
        missing = self._next
        if not self._early:
            return missing, []
        first = min(self._early)
        self._next = first
        return missing, self.offer(first, self._early[first])

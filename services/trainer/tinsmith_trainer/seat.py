"""A rank's place among those of its trainer."""

from __future__ import annotations

import msgspec


class Seat(msgspec.Struct, frozen=True):
    """Which of the ranks of a trainer a process is, and where they meet."""

    rank: int
    size: int
    meeting: str
    """A file that nobody else can reach."""

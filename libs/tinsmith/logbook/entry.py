"""One entry of a log: its bytes, what they say, their digest, and what can be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import msgspec
from blake3 import blake3

from tinsmith.errors import ServerError
from tinsmith.messages.base import decoder
from tinsmith.messages.ops import LogEntry, Owned, Record, StateSaved

_ENTRIES = decoder(LogEntry)


class LogDamaged(ServerError):
    """A log does not verify: ``field`` of the entry at ``place`` is not what it must be."""

    def __init__(self, place: str, field: str, problem: str) -> None:
        super().__init__(f"{place}: {field}: {problem}")
        self.place = place
        self.field = field
        self.problem = problem


class DigestMismatch(LogDamaged):
    """Bytes do not have the digest that the log has for them."""


@dataclass(frozen=True)
class Entry:
    """An entry as it is stored."""

    data: bytes
    entry: LogEntry
    blake3: str  # of ``data``: what the next entry names

    @classmethod
    def read(cls, data: bytes, place: str) -> Entry:
        """Decode ``data``; LogDamaged when it is no entry of a log."""
        try:
            return cls(data, _ENTRIES.decode(data), blake3(data).hexdigest())
        except msgspec.MsgspecError as exc:
            problem = f"not an entry that this version of Tinsmith can read ({exc})"
            raise LogDamaged(place, "entry", problem) from exc


def place_of(entry: LogEntry, number: int | None = None) -> str:
    """The entry in words, as errors name it; ``number`` is its place in the log, from 1."""
    match entry:
        case Record(seq=seq):
            name = f"op {seq}"
        case Owned(epoch=epoch):
            name = f"owner of epoch {epoch}"
        case StateSaved(seq=seq):
            name = f"state after op {seq}"
        case _:
            assert_never(entry)
    return name if number is None else f"entry {number} ({name})"


def place_after(number: int, seq: int | None) -> str:
    """An entry that can't be read, by the last op before it."""
    return f"entry {number} ({'before any op' if seq is None else f'after op {seq}'})"

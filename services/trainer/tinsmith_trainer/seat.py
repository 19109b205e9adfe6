"""A rank's place among those of its trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")  # which torch reads by itself


class Seat(msgspec.Struct, frozen=True):
    """Which of the ranks of a trainer a process is, and where they meet."""

    rank: int
    size: int
    meeting: str = ""
    """A file that nobody else can reach; empty: where torchrun says, which has started all."""
    place: int = 0
    """Which of the ranks on its machine it is."""
    beside: int = 1
    """How many these are."""


def given(environ: Mapping[str, str]) -> Seat | None:
    """The seat that torchrun has assigned in ``environ``; None if it did not start this process.

    Raises:
        ConfigError: what it says is no seat.
    """
    if not all(environ.get(name) for name in (*_NUMBERS, *_MEETING)):
        return None
    said = [environ[name] for name in _NUMBERS]
    numbers = [int(one) if one.isdecimal() else -1 for one in said]
    rank, size, place, beside = numbers
    if not (0 <= rank < size and 0 <= place < beside <= size):
        raise ConfigError(
            f"{', '.join(_NUMBERS)}: {', '.join(said)} are no place among ranks; unset them, or "
            "have torchrun start the trainer"
        )
    return Seat(rank, size, place=place, beside=beside)

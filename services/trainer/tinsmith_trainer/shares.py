"""In which sums the gradient of an op is added up, and which of its passes are made at once.

Pass k is of share k mod N. The passes of a share are added up in their order, and then the shares
in theirs. What that comes to depends on N alone, and not on whether N ranks made the shares at the
same time or one rank made one after another. So a log of any number of ranks is repeated bit for
bit on any other.

Where ranks hold slices of the sum (``slices``) each pass is a share of its own, so that none has to
hold more than its slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinsmith_trainer.parts import Made, Part

R = TypeVar("R")

MOST_RANKS = 64


class Adder(Protocol):
    """What adds the gradients of ranks up."""

    def add_up(self, sums: Tensor) -> None:
        """Put the sum over all ranks, in their order, in the place of each rank's ``sums``."""


class Team(Adder, Protocol):
    """The ranks of a trainer, as the passes of an op see them."""

    size: int
    """How many there are."""

    def agreed(self, call: Callable[[], R]) -> R:
        """What ``call``, which every rank makes, returns here; if it fails on one, it does on all.

        It must change nothing when it fails.
        """

    def made(self, parts: Sequence[Part], make: Callable[[Part], Made]) -> list[Made]:
        """What comes of ``parts``, each made by the rank of its position; errors as ``agreed``."""


class Alone:
    """The only rank."""

    size = 1

    def agreed(self, call: Callable[[], R]) -> R:
        """There is nobody to ask."""
        return call()

    def made(self, parts: Sequence[Part], make: Callable[[Part], Made]) -> list[Made]:
        """All of them, here."""
        return [make(part) for part in parts]

    def add_up(self, sums: Tensor) -> None:
        """It is the sum already."""


Round = tuple[int, ...]
"""Indices of passes that are made at once, the first by the first rank."""


def rounds(passes: int, shares: int, *, at_once: bool, is_apart: bool = False) -> list[list[Round]]:
    """The rounds of all shares together, each of them ``is_apart``; or those of each share."""
    if at_once:
        firsts = range(0, passes, shares)
        made = [tuple(range(first, min(first + shares, passes))) for first in firsts]
        return [[one] for one in made] if is_apart else [made]
    return [[(index,) for index in range(share, passes, shares)] for share in range(shares)]


class Sums:
    """Adds the shares of one gradient up."""

    def __init__(self, gradient: Tensor | None, adder: Adder, *, at_once: bool) -> None:
        """``gradient`` is where passes add to, if they do."""
        self._gradient = gradient
        self._adder = adder
        self._at_once = at_once
        self._total: Tensor | None = None

    def end_share(self) -> None:
        """The passes of a share, or those of all at once, were made."""
        if self._gradient is None:
            return
        if self._at_once:
            self._adder.add_up(self._gradient)
            return
        if self._total is None:
            self._total = self._gradient.clone()
        else:
            self._total += self._gradient
        self._gradient.zero_()

    def end(self) -> None:
        """Put the sum of all shares in the place of the gradient."""
        if self._gradient is not None and self._total is not None:
            self._gradient.copy_(self._total)

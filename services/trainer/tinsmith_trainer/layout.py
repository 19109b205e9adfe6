"""Where each tensor of a tenant lies in its flat arrays, and which are matrices of hidden layers.

A tenant's weights are one flat float32 array, and so are its gradient and the moments of its
optimizer. Adding, clipping, stepping and copying are then one operation each, whatever the number
of tensors, and a dropped tenant is a handful of arrays that nothing refers to any more.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a flat array."""

    name: str
    shape: tuple[int, ...]
    matrices: Callable[[Tensor], Tensor] | None = None
    """It as matrices [n, rows, columns], a view; None: it is no matrix of a hidden layer."""

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


class Layout:
    """The parts of a flat array, in its order."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(parts)
        *self._starts, self.size = accumulate((part.size for part in self.parts), initial=0)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Each part of ``flat`` [size] by its name, as a view of its shape."""
        views = {}
        start = 0
        for part in self.parts:
            views[part.name] = flat[start : start + part.size].view(part.shape)
            start += part.size
        return views

    def between(self, start: int, stop: int) -> Iterator[tuple[str, slice, slice]]:
        """What lies in ``flat[start:stop]``: the part, where in it, and where in that range."""
        for index in range(bisect_right(self._starts, start) - 1, len(self.parts)):
            begin, part = self._starts[index], self.parts[index]
            low, high = max(begin, start), min(begin + part.size, stop)
            if begin >= stop:
                return
            if low == high:  # a part without numbers
                continue
            yield part.name, slice(low - begin, high - begin), slice(low - start, high - start)

    def matrices(self, flat: Tensor) -> Mapping[str, Tensor]:
        """The parts that are matrices of hidden layers, as views [n, rows, columns]."""
        views = self.named(flat)
        return {
            part.name: part.matrices(views[part.name])
            for part in self.parts
            if part.matrices is not None
        }

    def rest(self) -> Layout:
        """The layout of a smaller array, of the parts that are no such matrices."""
        return Layout(part for part in self.parts if part.matrices is None)

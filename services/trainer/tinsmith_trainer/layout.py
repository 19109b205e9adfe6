"""Where each tensor of a tenant lies in its flat arrays, and which are matrices of hidden layers.

A tenant's weights are one flat float32 array, and so are its gradient and the moments of its
optimizer. Adding, clipping, stepping and copying are then one operation each, whatever the number
of tensors, and a dropped tenant is a handful of arrays that nothing refers to any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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
        self.size = sum(part.size for part in self.parts)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Each part of ``flat`` [size] by its name, as a view of its shape."""
        views = {}
        start = 0
        for part in self.parts:
            views[part.name] = flat[start : start + part.size].view(part.shape)
            start += part.size
        return views

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

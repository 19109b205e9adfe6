"""The memory for keys and values: one block of it, taken and given back in contiguous stretches.

A stretch belongs to one sequence, token by token. Attention then reads a sequence's keys as a
plain view, with nothing to gather, and the numbers it sees do not depend on where they lie.
Memory is taken at the end; when the end is reached the stretches still in use move together. So
an allocation succeeds exactly if that many slots are free, however scattered they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE = 16
"""Slots are handed out in multiples of this, so that every stretch begins well aligned."""


def whole_pages(tokens: int) -> int:
    """The slots that a stretch for so many tokens takes."""
    return -(-tokens // PAGE) * PAGE


@dataclass(eq=False, slots=True)
class Extent:
    """``size`` slots from ``start``; both change when the cache moves it."""

    start: int
    size: int


class KvCache:
    """Keys and values of all layers for ``capacity`` tokens.

    ``layers`` has the keys and the values of each layer, [1, head, slot, dim]. The slots beyond
    ``capacity`` are a place to write what nobody reads: the padding rows of a pass go there.
    """

    def __init__(
        self, planes: tuple[int, int, int], capacity: int, *, dtype: torch.dtype, device: str
    ) -> None:
        layers, heads, head_dim = planes
        self.capacity = whole_pages(capacity)
        self.scratch = self.capacity
        self._slots = torch.empty(
            (layers, 2, 1, heads, self.capacity + PAGE, head_dim), dtype=dtype, device=device
        )
        self.layers = [(layer[0], layer[1]) for layer in self._slots]
        self._beside: list[torch.Tensor] = []  # [slot, ...]
        self._extents: list[Extent] = []  # in order of their address
        self._end = 0
        self.used = 0

    def beside(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory [slot, *shape] for what else is to be known of each token; it moves with them."""
        slots = self._slots.shape[4]
        self._beside.append(torch.zeros((slots, *shape), dtype=dtype, device=self._slots.device))
        return self._beside[-1]

    @property
    def free(self) -> int:
        """Slots that nobody has, wherever they are."""
        return self.capacity - self.used

    def has_at_end(self, tokens: int) -> bool:
        """Whether a stretch for so many tokens can be taken without moving any other."""
        return self._end + whole_pages(tokens) <= self.capacity

    def take(self, tokens: int) -> Extent | None:
        """A stretch for so many tokens, or None when too few slots are free."""
        size = whole_pages(tokens)
        if size > self.free:
            return None
        if not self.has_at_end(size):
            self._compact()
        extent = Extent(self._end, size)
        self._extents.append(extent)
        self._end += size
        self.used += size
        return extent

    def give(self, extent: Extent) -> None:
        """Return a stretch."""
        self._extents.remove(extent)
        self.used -= extent.size
        self._end = self._last_end()

    def grow(self, extent: Extent, tokens: int) -> bool:
        """Make room for so many tokens, contents kept; False when too few slots are free."""
        more = whole_pages(tokens) - extent.size
        if more <= 0:
            return True
        if self._extents[-1] is extent:
            return self._stretch(extent, more)
        larger = self.take(extent.size + more)
        if larger is None:
            return False
        self.copy(extent, larger, extent.size)
        self.give(extent)
        extent.start, extent.size = larger.start, larger.size
        self._extents[-1] = extent
        return True

    def copy(self, source: Extent, target: Extent, tokens: int) -> None:
        """Copy the first tokens of one stretch into another."""
        self._slots.narrow(4, target.start, tokens).copy_(
            self._slots.narrow(4, source.start, tokens)
        )
        for one in self._beside:
            one.narrow(0, target.start, tokens).copy_(one.narrow(0, source.start, tokens))

    def _stretch(self, last: Extent, more: int) -> bool:
        if more > self.free:
            return False
        if last.start + last.size + more > self.capacity:
            self._compact()
        last.size += more
        self.used += more
        self._end = self._last_end()
        return True

    def _compact(self) -> None:
        end = 0
        for extent in self._extents:
            if extent.start > end:
                self._move(extent, end)
            end += extent.size
        self._end = end

    def _move(self, extent: Extent, start: int) -> None:
        old, size = extent.start, extent.size
        for layer in self._slots:
            # The ranges may overlap, and a copy between overlapping ranges is undefined.
            layer.narrow(3, start, size).copy_(layer.narrow(3, old, size).clone())
        for one in self._beside:
            one.narrow(0, start, size).copy_(one.narrow(0, old, size).clone())
        extent.start = start

    def _last_end(self) -> int:
        return self._extents[-1].start + self._extents[-1].size if self._extents else 0

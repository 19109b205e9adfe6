"""Which slice of a flat array each rank holds, and how slices come from whole arrays and back.

There are as many consecutive slices as ranks, each of whole blocks but where the array ends: of a
short one the last ranks have little or nothing. Every rank joins in every exchange, with as much as
any other: what lies beyond the end is sent as zeros and dropped.

Shapes: N ranks, C numbers of a chunk, [N, C] a chunk of each slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tinsmith_trainer.optim import NORM_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tinsmith_trainer.ranks import Ranks

    Between = Callable[[int, Tensor], object]
    """What fills or takes the numbers of a whole array from a position on."""

_CHUNK = 1 << 24  # numbers that are exchanged at a time


class Slices:
    """Those of one flat array, as one of the ranks has them."""

    def __init__(self, ranks: Ranks, size: int, device: torch.device) -> None:
        """Of an array of ``size`` numbers, float32, on ``device``."""
        self._ranks = ranks
        self._size = size
        self._device = device
        self._share = -(-size // (NORM_BLOCK * ranks.size)) * NORM_BLOCK
        self.mine = self.of(ranks.rank)
        """Where the slice of this rank lies."""

    def of(self, rank: int) -> slice:
        """Where the slice of ``rank`` lies."""
        start = min(rank * self._share, self._size)
        return slice(start, min(start + self._share, self._size))

    def zeros(self) -> Tensor:
        """A slice of this rank, float32."""
        return torch.zeros(self.mine.stop - self.mine.start, device=self._device)

    @torch.no_grad()
    def add_up(self, read: Between, sums: Tensor) -> None:
        """Add to ``sums``, a slice, what ``read`` fills in on each rank, in the order of ranks."""
        for offset, width in self._chunks():
            mine_NC = torch.zeros((self._ranks.size, width), device=self._device)
            for start, row_C in self._rows(mine_NC, offset):
                read(start, row_C)
            theirs_NC = torch.empty_like(mine_NC)
            self._ranks.swap(theirs_NC, mine_NC)
            total_C = sums[offset : offset + width]
            for row_C in theirs_NC:
                total_C += row_C[: len(total_C)]

    @torch.no_grad()
    def spread(self, mine: Tensor, write: Between) -> None:
        """Give ``write`` the slices of all ranks, in pieces and in no order."""
        for offset, width in self._chunks():
            piece_C = torch.zeros(width, device=self._device)
            own_C = mine[offset : offset + width]
            piece_C[: len(own_C)] = own_C
            rows_NC = torch.empty((self._ranks.size, width), device=self._device)
            self._ranks.spread(rows_NC, piece_C)
            for start, row_C in self._rows(rows_NC, offset):
                write(start, row_C)

    @torch.no_grad()
    def whole(self, mine: Tensor) -> Tensor:
        """The whole array, of which each rank has its slice; float32 on every rank."""
        found = torch.empty(self._size, device=self._device)
        self.spread(mine, lambda start, row: found[start : start + len(row)].copy_(row))
        return found

    @torch.no_grad()
    def deal(self, whole: Tensor) -> Tensor:
        """This rank's slice of ``whole``, which the first rank has, on any device."""
        mine = self.zeros()
        for offset, width in self._chunks():
            rows_NC = None
            if self._ranks.is_first:
                rows_NC = torch.zeros((self._ranks.size, width), device=self._device)
                for start, row_C in self._rows(rows_NC, offset):
                    row_C.copy_(whole[start : start + len(row_C)])
            piece_C = torch.empty(width, device=self._device)
            self._ranks.deal(piece_C, rows_NC)
            own_C = mine[offset : offset + width]
            own_C.copy_(piece_C[: len(own_C)])
        return mine

    def exchange(self, mine: Sequence[float]) -> list[float]:
        """The float32 numbers of all ranks, one after another."""
        said = self._ranks.exchange(np.asarray(mine, np.float32).tobytes())
        found: list[float] = np.frombuffer(b"".join(said), np.float32).tolist()
        return found

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Where in each slice, and of how many numbers."""
        most = max(1, _CHUNK // self._ranks.size)
        for offset in range(0, self._share, most):
            yield offset, min(most, self._share - offset)

    def _rows(self, table_NC: Tensor, offset: int) -> Iterator[tuple[int, Tensor]]:
        """What of each row lies in the array, and where it begins there."""
        for rank, row_C in enumerate(table_NC):
            start = rank * self._share + offset
            if start < self._size:
                yield start, row_C[: self._size - start]

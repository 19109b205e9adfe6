"""Where each element of a weight lies in memory that oneDNN has laid out: to be replaced in place.

oneDNN lays matrices out in blocks. Whatever the blocks are, a row and a column of the matrix each
add to an element's position. What they add is found by laying out a matrix of numbers, and every
element of that is looked at: another kind of layout is told, and has no positions.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tinsmith.weights.bits import Indices

    LayOut = Callable[[torch.Tensor], torch.Tensor]

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""By bytes of an element: torch has few operations on unsigned numbers."""

_BLOCK = 256  # rows that are looked at at a time

_MOST = 2**26
"""Elements of a matrix that is looked at: that takes some 20 bytes of each for a moment."""


class Layout(NamedTuple):
    """Of a matrix [out, in]."""

    rows: Indices  # [out]
    columns: Indices  # [in]

    def positions(self, indices: Indices) -> Indices:
        """Of the elements at ``indices`` [n], counted row by row."""
        row, column = np.divmod(indices, len(self.columns))
        found: Indices = self.rows[row]
        found += self.columns[column]
        return found


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, flat; a view."""
    return tensor.view(-1).view(_INTEGERS[tensor.itemsize])


def memory(laid_out: torch.Tensor) -> torch.Tensor:
    """All of it, in the order in which it lies, as integers [m]; valid while the tensor lives."""
    size = torch.ops.mkldnn._nbytes(laid_out)  # noqa: SLF001
    pointer = ctypes.cast(torch.ops.mkldnn.data_ptr(laid_out), ctypes.POINTER(ctypes.c_ubyte))
    held = torch.from_numpy(np.ctypeslib.as_array(pointer, (size,)))
    return held.view(_INTEGERS[laid_out.element_size()])


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are laid out in one way."""
    return torch.equal(_described(one), _described(other))


def layout(laid_out: torch.Tensor, lay_out: LayOut) -> Layout | None:
    """Of a tensor that ``lay_out`` has laid out; None if elements have no known positions in it."""
    if laid_out.numel() > _MOST:
        return None
    key = (laid_out.dtype, bytes(_described(laid_out).tolist()))
    if key not in _known:
        _known[key] = _found(laid_out, lay_out)
    return _known[key]


def _found(laid_out: torch.Tensor, lay_out: LayOut) -> Layout | None:
    outputs, inputs = laid_out.shape
    numbers = _numbers(laid_out, lay_out)  # from one on: what only pads is zero
    if numbers is None:
        return None
    rows = np.flatnonzero(numbers % inputs == 1 % inputs)
    rows = rows[numbers[rows] > 0]
    rows = rows[np.argsort(numbers[rows])]
    columns = np.flatnonzero((numbers > 0) & (numbers <= inputs))
    columns = columns[np.argsort(numbers[columns])]
    if (len(rows), len(columns)) != (outputs, inputs):
        return None
    columns -= columns[0]
    for first in range(0, outputs, _BLOCK):
        at = rows[first : first + _BLOCK, None] + columns
        expected = np.arange(first * inputs + 1, first * inputs + at.size + 1)
        if at.max() >= numbers.size or not np.array_equal(numbers[at].reshape(-1), expected):
            return None
    return Layout(rows, columns)


def _numbers(laid_out: torch.Tensor, lay_out: LayOut) -> NDArray[np.int64] | None:
    """The number of the element at each position; None if it is laid out otherwise."""
    count = laid_out.numel()
    width = 8 * laid_out.element_size()
    numbers = np.arange(1, count + 1, dtype=np.uint32)
    total: NDArray[np.int64] | None = None
    # A part of the numbers at a time, as bits of the tensor's type: it holds no larger ones.
    for shift in range(0, 32, width):
        part = (numbers >> np.uint32(shift)).astype(f"u{width // 8}").view(f"i{width // 8}")
        made = lay_out(torch.from_numpy(part).view(laid_out.dtype).view(laid_out.shape))
        if not are_alike(made, laid_out):
            return None
        held = memory(made).numpy()
        here = held.view(f"u{held.itemsize}").astype(np.int64) << shift
        total = here if total is None else total + here
    return total


def _described(laid_out: torch.Tensor) -> torch.Tensor:
    described: torch.Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(laid_out)  # noqa: SLF001
    return described


_known: dict[tuple[torch.dtype, bytes], Layout | None] = {}

"""How a frozen linear layer is computed, and how a row gets the same bits in any company.

On the CPU the weights are laid out once for oneDNN: torch's own linear lays them out at every
call, which costs more than the product itself for the few rows of a decoding pass. The operators
are those that torch's compiler emits for frozen weights.

A matrix kernel may add up in another order for another number of rows. So it is measured which
numbers of rows give a row the same bits, and products keep to those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from tinsmith_sampler import layouts
from tinsmith_sampler.layouts import integers

if TYPE_CHECKING:
    from tinsmith.weights.bits import Indices

Product = Callable[[torch.Tensor], torch.Tensor]
"""[1, n, in] -> [1, n, out]"""

BLOCK = 32
"""Most rows of a decoding pass where larger products give other bits."""

TALL_BLOCK = 128
"""Rows that every pass over prompts has where that matters."""

_CHEAPEST = 4
"""Rows that cost no more than fewer do: what kernels make at a time of a matrix that is read."""

_HINT = 32
"""Rows that oneDNN lays the weights out for; other numbers work as well, if less well."""

_TALL = 257
"""One more row than any pass has."""

_HEIGHTS = (64, 33, 32, 31, 17, 16, 13, 9, 8, 7, 4, 3, 2, 1)
"""Numbers of rows to compare: both sides of the tile sizes that matrix kernels use."""

_SPARE = 2**25
"""Elements of a weight up to which a stand-in is made to measure with."""


class RowRange(NamedTuple):
    """From ``least`` rows on a row has the same bits: without end, or up to a BLOCK of rows."""

    least: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class PassShape:
    """How many rows the passes of a model have, so that a row's bits depend on no other row."""

    decode_most: int  # rows of a decoding pass
    decode_least: int  # what it is padded to
    prompt_most: int  # rows of a pass over prompts
    prompt_least: int  # what it is padded to
    delta_least: int  # what the rows of one adapter are padded to elsewhere

    @classmethod
    def of(cls, ranges: Iterable[RowRange]) -> PassShape:
        """The shape for a model whose products have these ranges."""
        known = tuple(ranges)
        # Once for a whole pass, so that no product has to pad its own.
        least = max(_CHEAPEST, *(one.least for one in known))
        if all(one.is_open for one in known):
            most = _TALL - 1
            return cls(
                decode_most=most,
                decode_least=least,
                prompt_most=most,
                prompt_least=1,
                delta_least=1,
            )
        return cls(
            decode_most=BLOCK,
            decode_least=least,
            prompt_most=TALL_BLOCK,
            prompt_least=TALL_BLOCK,
            delta_least=BLOCK,
        )


class FrozenLinear:
    """``x @ weight.T + bias`` for a weight [out, in] that no pass changes.

    Fewer rows than ``rows.least`` are padded to it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._laid_out = _laid_out(weight)
        self._product = _product(self._laid_out, bias)
        self.rows = _row_range(weight, self._product)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        outputs, inputs = self._laid_out.shape
        return outputs, inputs

    def weight(self) -> torch.Tensor:
        """What is computed with, [out, in]: a copy where it is laid out for oneDNN, else itself."""
        return self._laid_out.to_dense() if self._laid_out.is_mkldnn else self._laid_out

    def replace(self, weight: torch.Tensor) -> None:
        """Compute with ``weight`` from now on, of the same shape; not while a pass runs."""
        if weight is self._laid_out:
            return
        laid_out = _laid_out(weight)
        if laid_out.is_mkldnn and layouts.are_alike(laid_out, self._laid_out):
            # Its memory stays: somebody may have found elements of layers that share it.
            layouts.memory(self._laid_out).copy_(layouts.memory(laid_out))
            return
        self._laid_out = laid_out
        self._product = _product(laid_out, self.bias)

    def elements(self, indices: Indices, *, first_row: int) -> tuple[torch.Tensor, Indices] | None:
        """The memory that is computed with, integers [m], and where in it elements are.

        ``indices`` count row by row from ``first_row`` on. The memory outlives ``replace``.
        None where it is laid out so that an element has no place of its own.
        """
        indices = indices + first_row * self._laid_out.shape[1]
        if not self._laid_out.is_mkldnn:
            return integers(self._laid_out), indices
        layout = layouts.layout(self._laid_out, _laid_out)
        if layout is None:
            return None
        return layouts.memory(self._laid_out), layout.positions(indices)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float [1, n, in] -> [1, n, out]."""
        n = x.shape[1]
        if n >= self.rows.least:
            return self._product(x)
        return self._product(pad_rows(x, self.rows.least)).narrow(1, 0, n)


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[1, n, in] with zeros added so that n is at least ``rows``."""
    missing = rows - x.shape[1]
    return functional.pad(x, (0, 0, 0, missing)) if missing > 0 else x


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    """As products want it."""
    if not _can_pack(weight):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _HINT)  # noqa: SLF001
    return packed


def _product(laid_out: torch.Tensor, bias: torch.Tensor | None) -> Product:
    if not laid_out.is_mkldnn:
        return lambda x: functional.linear(x, laid_out, bias)
    product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    return lambda x: product(x, laid_out, bias, "none", [], "")


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return weight.dtype == torch.float32


_measured: dict[tuple[torch.Size, torch.dtype], RowRange] = {}


def _row_range(weight: torch.Tensor, product: Product) -> RowRange:
    """``FrozenLinear.rows``, measured once for each shape; on a GPU a whole block, unmeasured."""
    if weight.device.type != "cpu":
        return RowRange(BLOCK, is_open=False)
    key = weight.shape, weight.dtype
    if key not in _measured:
        is_rounded = weight.dtype == torch.bfloat16
        _measured[key] = _of_bfloat16(weight) if is_rounded else _of_float32(weight, product)
    return _measured[key]


def _of_float32(weight: torch.Tensor, product: Product) -> RowRange:
    outputs, inputs = weight.shape
    if weight.numel() <= _SPARE:  # a fresh adapter's own B is zero, which would tell nothing
        product = _product(_laid_out(pattern(outputs, inputs)), None)
    return _range(product, inputs)


def _range(product: Product, inputs: int) -> RowRange:
    least = _least(product, pattern(_TALL, inputs))
    if least < BLOCK:  # padding to more would cost more than small passes do
        return RowRange(least, is_open=True)
    return RowRange(_least(product, pattern(BLOCK, inputs)), is_open=False)


def _of_bfloat16(weight: torch.Tensor) -> RowRange:
    """Tall products are not compared."""
    outputs, inputs = weight.shape
    x, stand_in = _cancelling(BLOCK, min(outputs, _SPARE // inputs), inputs)
    return RowRange(_least(_product(_laid_out(stand_in), None), x), is_open=False)


def _cancelling(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [rows, in] and a weight [out, in], bfloat16, all of whose exact products are zero.

    So a product is what adding up has rounded off, and shows in what order that was done. Of usual
    numbers bfloat16 hides all but one difference in 30,000.
    """
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
    ones, others = order[: inputs // 2], order[inputs // 2 : inputs // 2 * 2]
    x = pattern(rows, inputs).to(torch.bfloat16)
    weight = pattern(outputs, inputs).to(torch.bfloat16)
    weight[:, others] = weight[:, ones]
    x[:, others] = -x[:, ones]
    x[:, order[inputs // 2 * 2 :]] = 0
    return x, weight


def _least(product: Product, x: torch.Tensor) -> int:
    """The height from which on all heights give the same bits as the whole of x [rows, in]."""
    whole = product(x[None])
    least = len(x)
    for height in _HEIGHTS:
        if height >= len(x):
            continue
        if not torch.equal(product(x[None, :height]), whole[:, :height]):
            break
        least = height
    return least


def pattern(rows: int, columns: int) -> torch.Tensor:
    """Numbers without regularity, and torch's generator left alone."""
    return torch.arange(rows * columns, dtype=torch.float32).mul_(0.7).sin_().view(rows, columns)

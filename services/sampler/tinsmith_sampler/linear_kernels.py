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
from typing import NamedTuple

import torch
from torch.nn import functional

Product = Callable[[torch.Tensor], torch.Tensor]
"""[1, n, in] -> [1, n, out]"""

BLOCK = 32
"""Most rows of a decoding pass where larger products give other bits."""

TALL_BLOCK = 128
"""Rows that every pass over prompts has where that matters."""

_HINT = 32
"""Rows that oneDNN lays the weights out for; other numbers work as well, if less well."""

_TALL = 257
"""One more row than any pass has."""

_HEIGHTS = (64, 33, 32, 31, 17, 16, 13, 9, 8, 7, 4, 3, 2, 1)
"""Numbers of rows to compare: both sides of the tile sizes that matrix kernels use."""

_SPARE = 2**25
"""Elements of a weight up to which a stand-in is made to measure with."""

_OUTPUTS = 2**20
"""Values to compare in bfloat16: its rounding lets about one in 30,000 differences be seen."""


class RowRange(NamedTuple):
    """From ``least`` rows on a row has the same bits: without end, or up to a BLOCK of rows."""

    least: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class PassShape:
    """How many rows the passes of a model have, so that a row's bits depend on no other row."""

    decode_most: int  # rows of a decoding pass
    prompt_most: int  # rows of a pass over prompts
    prompt_least: int  # what it is padded to
    delta_least: int  # what the rows of one adapter are padded to elsewhere

    @classmethod
    def of(cls, ranges: Iterable[RowRange]) -> PassShape:
        """The shape for a model whose products have these ranges."""
        if all(one.is_open for one in ranges):
            return cls(decode_most=_TALL - 1, prompt_most=_TALL - 1, prompt_least=1, delta_least=1)
        return cls(
            decode_most=BLOCK, prompt_most=TALL_BLOCK, prompt_least=TALL_BLOCK, delta_least=BLOCK
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

    def weight(self) -> torch.Tensor:
        """What is computed with, [out, in]: a copy where it is laid out for oneDNN, else itself."""
        return self._laid_out.to_dense() if self._laid_out.is_mkldnn else self._laid_out

    def replace(self, weight: torch.Tensor) -> None:
        """Compute with ``weight`` from now on, of the same shape; not while a pass runs."""
        if weight is not self._laid_out:
            self._laid_out = _laid_out(weight)
            self._product = _product(self._laid_out, self.bias)

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
        if weight.numel() <= _SPARE:  # a fresh adapter's own B is zero, which would tell nothing
            pattern = _pattern(weight.shape[0], weight.shape[1]).to(weight.dtype)
            product = _product(_laid_out(pattern), None)
        _measured[key] = _measure(product, weight)
    return _measured[key]


def _measure(product: Product, weight: torch.Tensor) -> RowRange:
    outputs, inputs = weight.shape
    if (
        weight.dtype == torch.float32
    ):  # in bfloat16 a difference in tall products is hard to exclude
        least = _least(product, _pattern(_TALL, inputs))
        if least < BLOCK:  # padding to more would cost more than small passes do
            return RowRange(least, is_open=True)
    blocks = min(64, max(1, _OUTPUTS // (BLOCK * outputs)))
    x = _pattern(blocks * BLOCK, inputs).to(weight.dtype)
    return RowRange(max(_least(product, block) for block in torch.split(x, BLOCK)), is_open=False)


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


def _pattern(rows: int, columns: int) -> torch.Tensor:
    """Numbers without regularity, and torch's generator left alone."""
    return torch.arange(rows * columns, dtype=torch.float32).mul_(0.7).sin_().view(rows, columns)

"""How a frozen linear layer is computed, and how a row gets the same bits in any company.

On the CPU the weights are laid out once for oneDNN: torch's own linear lays them out at every
call, which costs more than the product itself for the few rows of a decoding pass. The operators
are those that torch's compiler emits for frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Product = Callable[[torch.Tensor], torch.Tensor]
"""[1, n, in] -> [1, n, out]"""

FIXED_HEIGHT = 32
"""Rows of a decoding pass where the bits depend on the number of rows."""

_HINT = 32
"""Rows that oneDNN lays the weights out for; other numbers work as well, if less well."""

_HEIGHTS = (64, 33, 32, 31, 17, 16, 13, 9, 8, 7, 4, 3, 2, 1)
"""Heights to compare: both sides of the tile sizes that matrix kernels use."""

_TALLEST = 257
"""Compared with a product over so many rows: about the most that a pass has."""

_SPARE = 2**25
"""Elements of a weight up to which a stand-in is made to measure with."""

_measured: dict[tuple[int, int], int | None] = {}


class FrozenLinear:
    """``x @ weight.T + bias`` for a weight [out, in] that never changes.

    ``least`` is the number of rows from which on a row's bits are the same whatever the number of
    rows; fewer are padded to it. None: no such number is known, and nothing is padded.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._product = _product(weight, bias)
        self.least = _least(weight, self._product)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float [1, n, in] -> [1, n, out]."""
        n = x.shape[1]
        if self.least is None or n >= self.least:
            return self._product(x)
        padded = x.expand(1, self.least, -1) if n == 1 else _padded(x, self.least - n)
        return self._product(padded).narrow(1, 0, n)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return functional.pad(x, (0, 0, 0, rows))


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    if not _can_pack(weight):
        return lambda x: functional.linear(x, weight, bias)
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight.contiguous(), _HINT)  # noqa: SLF001
    product = ops._linear_pointwise  # noqa: SLF001
    return lambda x: product(x, packed, bias, "none", [], "")


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return weight.dtype == torch.float32


def _least(weight: torch.Tensor, product: Product) -> int | None:
    """``FrozenLinear.least``, measured once for each shape.

    Only float32 on a CPU is measured, where it tends to be 1 or 2. In bfloat16 the rounding of
    the output hides most differences, so that a measurement would prove nothing.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    outputs, inputs = weight.shape
    if (outputs, inputs) not in _measured:
        if weight.numel() <= _SPARE:  # a fresh adapter's own B is zero, which would tell nothing
            product = _product(_pattern(outputs, inputs), None)
        _measured[outputs, inputs] = _measure(product, _pattern(_TALLEST, inputs)[None])
    return _measured[outputs, inputs]


def _measure(product: Product, x: torch.Tensor) -> int | None:
    whole = product(x)
    least = None
    for height in _HEIGHTS:
        if not torch.equal(product(x[:, :height]), whole[:, :height]):
            break
        least = height
    return least


def _pattern(rows: int, columns: int) -> torch.Tensor:
    """Numbers without regularity, and torch's generator left alone."""
    return torch.arange(rows * columns, dtype=torch.float32).mul_(0.7).sin_().view(rows, columns)

"""The products of frozen weights: right, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from tinsmith_sampler import linear_kernels
from tinsmith_sampler.linear_kernels import BLOCK, FrozenLinear, PassShape, RowRange

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((64, 64), (32, 1536), (1536, 8), (960, 576))  # out, in


def weight(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def inputs(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, rows, width, generator=torch.Generator().manual_seed(6)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_product_is_that_of_torch(dtype, rows):
    w, bias = weight((48, 64), dtype), weight((48, 1), dtype)[:, 0]
    x = inputs(rows, 64, dtype)

    torch.testing.assert_close(
        FrozenLinear(w, bias)(x), torch.nn.functional.linear(x, w, bias), atol=1e-4, rtol=1e-2
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(dtype, shape):
    product = FrozenLinear(weight(shape, dtype))
    x = inputs(256 if product.rows.is_open else BLOCK, shape[1], dtype)
    whole = product(x)

    assert all(
        torch.equal(product(x[:, first : first + count]), whole[:, first : first + count])
        for first, count in [(0, 1), (3, 1), (7, 2), (1, 5), (9, 17), (0, 31)]
    )


def test_weights_of_zero_tell_nothing_about_their_shape(monkeypatch):
    monkeypatch.setattr(linear_kernels, "_measured", {})
    of_zeros = FrozenLinear(torch.zeros(40, 1536)).rows
    monkeypatch.setattr(linear_kernels, "_measured", {})

    assert of_zeros == FrozenLinear(weight((40, 1536), torch.float32)).rows


def test_the_rows_from_which_on_nothing_changes_are_found():
    """A kernel that adds up otherwise for fewer than five: of those compared, seven is safe."""

    def product(x):
        return x * (2 if x.shape[1] < 5 else 1)

    assert linear_kernels._least(product, torch.ones(64, 3)) == 7


def test_a_kernel_that_changes_in_tall_products_keeps_to_blocks():
    w = torch.ones(3, 3)

    def product(x):
        return x * (2 if x.shape[1] > BLOCK else 1)

    assert linear_kernels._measure(product, w) == RowRange(1, is_open=False)


@pytest.mark.parametrize("is_open", [True, False])
def test_passes_are_as_tall_as_the_least_of_the_products_allows(is_open):
    shape = PassShape.of([RowRange(2, is_open=True), RowRange(1, is_open=is_open)])

    assert (shape.decode_most > BLOCK, shape.prompt_least == 1) == (is_open, is_open)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_adds_rows_of_zeros_and_only_where_they_are_missing(dtype):
    x = inputs(3, 4, dtype)

    assert torch.equal(linear_kernels.pad_rows(x, 2), x)
    assert linear_kernels.pad_rows(x, 5)[0, 3:].count_nonzero() == 0

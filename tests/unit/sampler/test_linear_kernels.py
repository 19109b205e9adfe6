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
    def product(x):
        return x * (2 if x.shape[1] > BLOCK else 1)

    assert linear_kernels._range(product, 3) == RowRange(1, is_open=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_hides_no_other_order_of_adding_up(shape):
    """Rounding shows one in thousands of sums that differ; of sums that cancel, most."""
    x, w = linear_kernels._cancelling(BLOCK, *shape)
    product = FrozenLinear(w)
    whole = product(x[None])

    assert whole.abs().max() < 1e-4 * x.abs().sum()
    for count in (1, 2, 3, 5, 9, 17, 31):
        assert torch.equal(product(x[None, :count]), whole[:, :count])


def test_a_kernel_that_adds_up_one_row_otherwise_is_found_in_bfloat16(monkeypatch):
    def product(x, w):
        terms = x.float().unsqueeze(-2) * w.float()
        exact = terms.double().sum(-1)
        return (terms.sum(-1) if x.shape[1] == 1 else exact).to(torch.bfloat16)

    monkeypatch.setattr(linear_kernels, "_product", lambda w, _: lambda x: product(x, w))
    monkeypatch.setattr(linear_kernels, "_laid_out", lambda w: w)
    w = weight((8, 576), torch.bfloat16)

    assert linear_kernels._of_bfloat16(w).least == 2


@pytest.mark.parametrize("is_open", [True, False])
def test_passes_are_as_tall_as_the_least_of_the_products_allows(is_open):
    shape = PassShape.of([RowRange(2, is_open=True), RowRange(1, is_open=is_open)])

    assert (shape.decode_most > BLOCK, shape.prompt_least == 1) == (is_open, is_open)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("least", [1, 8, BLOCK])
def test_no_product_of_a_decoding_pass_has_to_be_padded_and_none_has_a_single_row(least, is_open):
    """Four rows cost less than one, whose weights have to be read as well."""
    shape = PassShape.of([RowRange(1, is_open=True), RowRange(least, is_open=is_open)])

    assert shape.decode_most >= shape.decode_least == max(4, least)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_adds_rows_of_zeros_and_only_where_they_are_missing(dtype):
    x = inputs(3, 4, dtype)

    assert torch.equal(linear_kernels.pad_rows(x, 2), x)
    assert linear_kernels.pad_rows(x, 5)[0, 3:].count_nonzero() == 0

"""Planes against slow references: every rounding, every scale, and changes against the whole."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.errors import InvalidRequest
from tinsmith.weights.codes import FP8, INT8, LEAST_EXPONENT, quantise, scales
from tinsmith.weights.planes import (
    FP8_BLOCKS,
    FP32,
    INT8_ROWS,
    PLANES,
    Quantised,
    plane,
)
from tinsmith.weights.sparse import Sparse
from tinsmith.weights.specs import TensorSpec

EVERY = np.arange(1 << 16, dtype=np.uint16)
UNSCALED = np.full(1, 127, np.uint8)


def values_of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp8_value(code):
    """By the book: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -size if code & 0x80 else size


def nearest(number, ladder):
    """The index of the rung nearest to ``number``; of two, the even one."""
    above = bisect.bisect_left(ladder, number)
    near = range(max(above - 1, 0), above + 1)
    return min(near, key=lambda i: (abs(number - ladder[i]), i % 2))


def of_positive(ladder, *, nan):
    """The code of every pattern without a sign: the nearest of ``ladder``, saturating."""
    found = []
    for number in values_of(EVERY[:0x8000]).tolist():
        size = ladder[-1] if math.isinf(number) else number
        found.append(nan if math.isnan(size) else nearest(min(Fraction(size), ladder[-1]), ladder))
    return found


def test_every_fp8_code_is_the_nearest_one_ties_to_even():
    codes = quantise(FP8, EVERY[None], UNSCALED)[0].reshape(2, -1)
    is_nan = np.isnan(values_of(EVERY[:0x8000]))

    assert codes[0].tolist() == of_positive([fp8_value(code) for code in range(0x7F)], nan=0x7F)
    assert np.array_equal(codes[1], np.where(is_nan, 0x7F, codes[0] | 0x80))


def test_every_int8_code_is_the_nearest_one_ties_to_even():
    codes = quantise(INT8, EVERY[None], UNSCALED)[0].view(np.int8).reshape(2, -1)

    assert codes[0].tolist() == of_positive([Fraction(i) for i in range(128)], nan=-128)
    assert np.array_equal(codes[1], -codes[0])  # -(-128) is -128


def test_torch_rounds_to_the_same_fp8_codes():
    """Where both saturate or neither: torch makes NaN of what is over 448."""
    there = np.abs(values_of(EVERY)) <= 448
    theirs = torch.from_numpy(values_of(EVERY)[there]).to(torch.float8_e4m3fn).view(torch.uint8)

    assert np.array_equal(quantise(FP8, EVERY[None], UNSCALED)[0][there], theirs.numpy())


@pytest.mark.parametrize(("code", "most"), [(FP8, 448), (INT8, 127)])
def test_every_scale_is_the_least_that_fits(code, most):
    positive = EVERY[:0x7F80]
    stored = scales(code, positive[:, None]).astype(int) - 127
    for number, exponent in zip(values_of(positive).tolist(), stored.tolist(), strict=True):
        size = Fraction(number)

        assert size <= most * Fraction(2) ** exponent
        assert exponent == LEAST_EXPONENT or size > most * Fraction(2) ** (exponent - 1)


@pytest.mark.parametrize("code", [FP8, INT8])
def test_machines_that_take_subnormals_for_zero_find_the_same_codes(code):
    subnormal = EVERY[:0x80]
    least = np.full(1, LEAST_EXPONENT + 127, np.uint8)

    assert not quantise(code, subnormal[None], least).any()


@pytest.mark.parametrize("code", [FP8, INT8])
def test_codes_at_a_scale_are_those_of_the_divided_numbers(code):
    """Over exponents; a division in double precision is exact here."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        numbers = rng.standard_normal(64) * 2.0 ** rng.integers(-100, 100)
        groups = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)[None]
        stored = scales(code, groups)
        divided = (values_of(groups[0]).astype(np.float64) / 2.0 ** (int(stored[0]) - 127)).astype(
            np.float32
        )
        patterns = (divided.view(np.uint32) >> 16).astype(np.uint16)

        assert np.array_equal(quantise(code, groups, stored)[0], code.table[patterns])


def test_an_infinity_or_nan_does_not_move_the_scale_of_others():
    group = np.array([[0x3F80, 0x7F80, 0xFF80, 0x7FC1]], np.uint16)  # 1, inf, -inf, NaN
    alone = np.array([[0x3F80]], np.uint16)

    assert scales(FP8, group) == scales(FP8, alone)
    assert quantise(FP8, group, scales(FP8, group))[0].tolist()[1:] == [0x7E, 0xFE, 0x7F]


SHAPES = st.sampled_from([(3, 200), (2, 128), (1, 1), (5, 7), (2, 3, 130), (4, 256), (64,)])


@given(
    shape=SHAPES,
    seed=st.integers(0, 2**32 - 1),
    share=st.floats(0.0, 1.0),
    plane_id=st.sampled_from(sorted(PLANES)),
    wild=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_what_shifts_is_the_difference_of_the_wholes(shape, seed, share, plane_id, wild):
    rng = np.random.default_rng(seed)
    spec = TensorSpec("bfloat16", shape)
    old = rng.integers(0, 1 << 16, spec.size).astype(np.uint16)
    if not wild:
        old = (rng.standard_normal(spec.size).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
    indices = np.flatnonzero(rng.random(spec.size) < share)
    step = rng.integers(1, 4, indices.size).astype(np.uint16)
    new = old.copy()
    new[indices] += step
    rule = plane(plane_id)
    before, after = rule.whole("w", spec, old), rule.whole("w", spec, new)
    shifts = rule.shifts("w", spec, old, Sparse(indices, new[indices]))

    assert before.keys() == after.keys() == rule.specs("w", spec).keys() == shifts.keys()
    for name, shift in shifts.items():
        assert before[name].size == rule.specs("w", spec)[name].size
        assert np.array_equal(before[name][shift.indices], shift.old)
        before[name] = before[name].copy()
        before[name][shift.indices] = shift.new
        assert np.array_equal(before[name], after[name])


@pytest.mark.parametrize("rule", [INT8_ROWS, FP8_BLOCKS], ids=lambda rule: rule.id)
def test_numbers_come_back_within_half_a_step(rule):
    rng = np.random.default_rng(0)
    spec = TensorSpec("bfloat16", (16, 300))
    bits = (rng.standard_normal(4800).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    held = rule.whole("w", spec, bits)
    per_row = rule.specs("w", spec)["w:scale"].shape[-1]
    factor = np.ldexp(1.0, held["w:scale"].astype(int) - 127).reshape(16, per_row)
    factor = np.repeat(factor, 300 if per_row == 1 else 128, axis=1)[:, :300].reshape(-1)
    codes = held["w"]
    numbers = (
        codes.view(np.int8).astype(float)
        if rule is INT8_ROWS
        else torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    )
    error = np.abs(numbers * factor - values_of(bits))

    if rule is INT8_ROWS:
        assert (error <= factor / 2).all()
    else:  # half of the last of three bits, or of a subnormal step
        assert (error <= np.maximum(np.abs(values_of(bits)) / 16, factor * 2.0**-10)).all()


def test_a_group_is_never_longer_than_a_row():
    small = Quantised("x", "int8", INT8, 128)
    spec = TensorSpec("bfloat16", (4, 8))

    assert small.specs("w", spec)["w:scale"].shape == (4, 1)


def test_float32_holds_the_same_numbers():
    held = FP32.whole("w", TensorSpec("bfloat16", (EVERY.size,)), EVERY)["w"]

    assert np.array_equal(held.view(np.float32), values_of(EVERY), equal_nan=True)


def test_an_unknown_plane_is_refused_with_those_there_are():
    with pytest.raises(InvalidRequest, match=r"int4.*int8\.row"):
        plane("int4")

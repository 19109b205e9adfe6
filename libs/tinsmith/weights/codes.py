"""Eight-bit codes of bfloat16 numbers that share a scale, by integer rules alone.

A group of numbers has one scale ``2**e``: ``e`` is the least integer with
``amax <= MAX * 2**e``, but at least ``LEAST_EXPONENT``; ``amax`` is the largest finite magnitude,
and MAX the largest number that a code stands for. A number's code is that of ``x / 2**e``, rounded
to nearest, ties to even, and no further than MAX. Division by a power of two is exact, so that
no two machines differ. Scales are stored as one byte, ``e + 127`` (E8M0 of the OCP Microscaling
Formats, v1.0); a group without a finite number above zero has the least one.

fp8   E4M3 without infinities (OCP 8-bit Floating Point, v1.0): MAX 448; a NaN is 0x7f
int8  two's complement: MAX 127; a NaN is -128, which no number gets

Infinities become MAX with their sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tinsmith.weights.bits import Bits, Bytes

LEAST_EXPONENT = -115
"""Below it, the codes of subnormal numbers would matter, which some machines take for zero."""
BIAS = 127
_MAGNITUDE = 0x7FFF
_INFINITE = 0x7F80


class Code(NamedTuple):
    """One kind of codes; ``table`` is its code of each bfloat16 pattern, at scale one."""

    table: Bytes
    top: int  # MAX lies in [2**top, 2**(top + 1))
    top_mantissa: int  # and is 2**top * (1 + top_mantissa / 128)


def _numbers() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of every bfloat16 pattern, its value."""
    wide = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    # Quiet, before a conversion could warn of it.
    values: np.ndarray[tuple[int], np.dtype[np.float64]] = np.nan_to_num(
        wide.view(np.float32), nan=0.0, posinf=1e30, neginf=-1e30
    ).astype(np.float64)
    return values


def _is_nan() -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return (np.arange(1 << 16) & _MAGNITUDE) > _INFINITE


def _fp8() -> Bytes:
    size = np.minimum(np.abs(_numbers()), 448.0)
    # Three bits behind the leading one; below 2**-6 the steps stay as they are there.
    exponent = np.maximum(np.frexp(size)[1] - 1, -6)
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int64)  # rint: ties to even
    # A carry out of the mantissa runs into the exponent, as in any such format.
    codes = np.where(size < 2.0**-6, steps, ((exponent + 7) << 3) + steps - 8)
    signs = (np.arange(1 << 16) >> 8) & 0x80
    table: Bytes = np.where(_is_nan(), 0x7F, codes | signs).astype(np.uint8)
    return table


def _int8() -> Bytes:
    rounded = np.rint(np.clip(_numbers(), -127.0, 127.0)).astype(np.int64)
    table: Bytes = np.where(_is_nan(), 0x80, rounded & 0xFF).astype(np.uint8)
    return table


FP8 = Code(_fp8(), top=8, top_mantissa=96)
INT8 = Code(_int8(), top=6, top_mantissa=126)


def scales(code: Code, groups: Bits) -> Bytes:
    """The stored scale of each row of ``groups`` (uint16 [G, n], bfloat16 patterns)."""
    amax = (groups & np.uint16(_MAGNITUDE)).max(axis=1, initial=0)
    if (amax >= _INFINITE).any():
        sizes = groups & np.uint16(_MAGNITUDE)
        amax = np.where(sizes < _INFINITE, sizes, 0).max(axis=1, initial=0)
    exponent = (amax >> 7).astype(np.int64) - BIAS - code.top
    exponent += (amax & 0x7F) > code.top_mantissa
    stored: Bytes = (np.maximum(exponent, LEAST_EXPONENT) + BIAS).astype(np.uint8)
    return stored


def quantise(code: Code, groups: Bits, stored: Bytes) -> Bytes:
    """The codes of ``groups`` (uint16 [G, n]), each row at its scale of ``scales``."""
    wide = groups.astype(np.uint32)
    wide <<= np.uint32(16)
    numbers = wide.view(np.float32)
    # 2**-e, written as its pattern. What underflows is far below half of the smallest code.
    factor = ((2 * BIAS - stored.astype(np.uint32)) << np.uint32(23)).view(np.float32)
    with np.errstate(invalid="ignore", under="ignore"):
        numbers *= factor[:, None]
    wide >>= np.uint32(16)
    codes: Bytes = code.table[wide]
    return codes

"""Bit patterns of floating-point numbers as integers that are in the order of the numbers.

A step of one along these integers is one unit in the last place, across zero too, so that a
small change of a number is a small integer. The map is a bijection on all patterns: signed zeros,
infinities, NaNs and their payloads come back as they were.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""uint8, uint16 or uint32 [n]."""
Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]


BLOCK = 1 << 18  # elements: the temporaries of one block stay in a core's cache


def ordered(bits: Bits) -> Bits:
    """The rank of each pattern: negative numbers below positive ones, both ascending."""
    ranks: Bits = bits ^ (_spread(bits) | _sign(bits))
    return ranks


def unordered(ranks: Bits) -> Bits:
    """The patterns of these ranks: the inverse of ``ordered``."""
    bits: Bits = ranks ^ (~_spread(ranks) | _sign(ranks))
    return bits


def zigzag(steps: Bits) -> Bits:
    """Two's complement steps as integers that are small when the step is: 0, -1, 1, -2, ..."""
    width = steps.dtype.itemsize * 8
    signed = steps.view(f"i{steps.itemsize}")
    folded: Bits = ((signed << 1) ^ (signed >> (width - 1))).view(steps.dtype)
    return folded


def unzigzag(folded: Bits) -> Bits:
    """The inverse of ``zigzag``."""
    one = folded.dtype.type(1)
    steps: Bits = (folded >> one) ^ -(folded & one)
    return steps


def changed(old: Bits, new: Bits) -> Indices:
    """Where two arrays of equal length differ, ascending."""
    found = []
    for start in range(0, old.size, BLOCK):
        here = np.flatnonzero(old[start : start + BLOCK] != new[start : start + BLOCK])
        here += start
        found.append(here)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _spread(bits: Bits) -> Bits:
    """All ones where the sign is set, else zeros."""
    spread: Bits = (bits.view(f"i{bits.itemsize}") >> (bits.itemsize * 8 - 1)).view(bits.dtype)
    return spread


def _sign(bits: Bits) -> np.unsignedinteger[Any]:
    sign: np.unsignedinteger[Any] = bits.dtype.type(1 << (bits.itemsize * 8 - 1))
    return sign

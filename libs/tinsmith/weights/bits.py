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
    sign = _sign(bits)
    flipped: Bits = np.where(bits & sign, ~bits, bits | sign)
    return flipped


def unordered(ranks: Bits) -> Bits:
    """The patterns of these ranks: the inverse of ``ordered``."""
    sign = _sign(ranks)
    bits: Bits = np.where(ranks & sign, ranks ^ sign, ~ranks)
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
    found = [
        start + _changed_in_block(old[start : start + BLOCK], new[start : start + BLOCK])
        for start in range(0, old.size, BLOCK)
    ]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _changed_in_block(old: Bits, new: Bits) -> Indices:
    """Eight bytes at a time: as a rule few words differ, and only those are looked into."""
    per_word = 8 // old.itemsize
    if old.size % per_word:
        return np.flatnonzero(old != new)
    words = np.flatnonzero(old.view(np.uint64) != new.view(np.uint64))
    if words.size * per_word > old.size // 4:
        return np.flatnonzero(old != new)
    elements = (old.reshape(-1, per_word)[words] != new.reshape(-1, per_word)[words]).reshape(-1)
    candidates = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    found: Indices = candidates[elements]
    return found


def _sign(bits: Bits) -> np.unsignedinteger[Any]:
    sign: np.unsignedinteger[Any] = bits.dtype.type(1 << (bits.itemsize * 8 - 1))
    return sign

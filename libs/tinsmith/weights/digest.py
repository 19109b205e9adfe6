"""Digests of tensors that add up: kept current by what changed alone, summed over shards.

    D(tensor) = sum over i of mix64(((i << 32) | bits_i) * GOLDEN + salt)   (mod 2**64)

where i is the element's index in the checkpoint's order, ``salt`` the first 8 bytes of the blake3
of the tensor's name, and mix64 the finalizer of splitmix64 (Steele, Lea, Flood 2014). This finds
errors; it does not stand against an adversary, for whom there is blake3 at anchors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from tinsmith.weights.bits import Bits, Indices

FORMAT = "tinsmith-root-1"
BLOCK = 1 << 15  # elements at a time: what a core's cache holds
_U = np.uint64
GOLDEN = _U(0x9E3779B97F4A7C15)
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_STEPS = (np.arange(BLOCK, dtype=_U) << _U(32)) * GOLDEN
"""What the indices of a block add, beside that of its first."""


class TensorEntry(NamedTuple):
    """A tensor as a root names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: int


def digest(name: str, bits: Bits, *, start: int = 0) -> int:
    """The digest of a whole tensor, or of the shard of it that begins at element ``start``."""
    salt, total = int(_salt(name)), 0
    mixed, spare = np.empty((2, min(BLOCK, bits.size)), _U)
    for offset in range(0, bits.size, BLOCK):
        block = bits[offset : offset + BLOCK]
        x = np.multiply(block, GOLDEN, out=mixed[: block.size], dtype=_U)
        x += _STEPS[: block.size]
        x += _U(((start + offset << 32) * int(GOLDEN) + salt) & _MASK)
        total += _mixed(x, spare[: block.size])
    return total & _MASK


def updated(name: str, before: int, indices: Indices, old: Bits, new: Bits) -> int:
    """The digest after the elements at ``indices`` went from ``old`` to ``new``."""
    salt, at = _salt(name), indices.astype(_U)
    return (before - _sum(at, old, salt) + _sum(at, new, salt)) & _MASK


def part(name: str, indices: Indices, bits: Bits) -> int:
    """What the elements at ``indices`` with these ``bits`` add to the tensor's digest."""
    return _sum(indices.astype(_U), bits, _salt(name)) & _MASK


def salt(name: str) -> int:
    """Of the tensor's digest: for whoever computes it elsewhere."""
    return int(_salt(name))


def root(entries: Iterable[TensorEntry]) -> str:
    """One name for a whole state, in hex: equal roots, equal bits of equal tensors."""
    listed = [(e.name, e.dtype, e.shape, e.digest) for e in sorted(entries)]
    return blake3(msgspec.msgpack.encode((FORMAT, listed))).hexdigest()


def _salt(name: str) -> np.uint64:
    return _U(int.from_bytes(blake3(name.encode()).digest(8), "little"))


def _sum(index: NDArray[np.uint64], bits: Bits, salt: np.uint64) -> int:
    x = index << _U(32)
    x |= bits
    x *= GOLDEN
    x += salt
    return _mixed(x, np.empty_like(x))


def _mixed(x: NDArray[np.uint64], spare: NDArray[np.uint64]) -> int:
    """The sum of mix64 of each; both arrays are spent."""
    x ^= np.right_shift(x, _U(30), out=spare)
    x *= _U(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, _U(27), out=spare)
    x *= _U(0x94D049BB133111EB)
    x ^= np.right_shift(x, _U(31), out=spare)
    return int(x.sum(dtype=_U))

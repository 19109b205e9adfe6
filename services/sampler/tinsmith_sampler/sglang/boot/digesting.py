"""Digests of what lies in SGLang's memory, as ``tinsmith.weights.digest`` has them of numpy arrays.

    D(tensor) = sum over i of mix64(((i << 32) | bits_i) * GOLDEN + salt)   (mod 2**64)

Torch has no operations on unsigned numbers of 64 bits; sums and products of signed ones wrap to the
same bits, and a shift to the right is masked.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ON_CPU = 1 << 15  # elements at a time: what a core's cache holds
_ON_GPU = 1 << 24


def digest(bits: torch.Tensor, salt: int) -> int:
    """Of a tensor that is whole. ``bits`` are integers [n], ``salt`` is below 2**64."""
    step = _ON_GPU if bits.is_cuda else _ON_CPU
    total = 0
    for start in range(0, bits.numel(), step):
        block = bits[start : start + step]
        index = torch.arange(start, start + block.numel(), device=bits.device)
        total += digest_at(index, block, salt)
    return total & _MASK


def digest_at(index: torch.Tensor, bits: torch.Tensor, salt: int) -> int:
    """The part of a digest that elements at ``index``, int64 [n], with ``bits`` [n] add to it."""
    x = index << 32
    x |= bits.to(torch.int64) & ((1 << (8 * bits.element_size())) - 1)
    x *= _signed(_GOLDEN)
    x += _signed(salt)
    x ^= (x >> 30) & (_MASK >> 30)
    x *= _signed(_FIRST)
    x ^= (x >> 27) & (_MASK >> 27)
    x *= _signed(_SECOND)
    x ^= (x >> 31) & (_MASK >> 31)
    return int(x.sum()) & _MASK


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word

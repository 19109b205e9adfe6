"""Digests of what lies in SGLang's memory, as ``tinsmith.weights.digest`` has them of numpy arrays.

    D(tensor) = sum over i of mix64(((i << 32) | bits_i) * GOLDEN + salt)   (mod 2**64)

Torch has no operations on unsigned numbers of 64 bits; sums and products of signed ones wrap to the
same bits, and a shift to the right is masked.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ON_CPU = 1 << 16  # elements at a time: what a core's cache holds
_ON_GPU = 1 << 24


def digest(bits: torch.Tensor, salt: int) -> int:
    """Of a tensor that is whole. ``bits`` are integers [n], ``salt`` is below 2**64."""
    total, size = 0, step(bits)
    for start in range(0, bits.numel(), size):
        block = bits[start : start + size]
        index = torch.arange(start, start + block.numel(), device=bits.device)
        total += int(_mixed(keys(index, salt), block).sum())
    return total & _MASK


def digest_parts(keys: torch.Tensor, bits: torch.Tensor, sizes: list[int]) -> list[int]:
    """What elements of several tensors add to the digests of theirs.

    ``keys`` and ``bits`` are those of all, [n], one tensor's after another; ``sizes``: how many
    each has.
    """
    mixed, size = torch.empty_like(keys), step(bits)
    for start in range(0, bits.numel(), size):
        here = slice(start, start + size)
        mixed[here] = _mixed(keys[here], bits[here])
    if not sizes:
        return []
    sums = torch.stack([one.sum() for one in torch.split(mixed, sizes)])
    return [one & _MASK for one in sums.tolist()]


def keys(index: torch.Tensor, salt: int) -> torch.Tensor:
    """What elements at ``index``, int64 [n], bring into a digest, whatever their bits are."""
    # The bits lie below 2**32: what they are or-ed to may as well be added, and multiplied before.
    found = index << 32
    found *= _signed(_GOLDEN)
    found += _signed(salt)
    return found


def _mixed(keys: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    x = bits.to(torch.int64)
    x &= (1 << (8 * bits.element_size())) - 1
    x *= _signed(_GOLDEN)
    x += keys
    x ^= (x >> 30) & (_MASK >> 30)
    x *= _signed(_FIRST)
    x ^= (x >> 27) & (_MASK >> 27)
    x *= _signed(_SECOND)
    x ^= (x >> 31) & (_MASK >> 31)
    return x


def step(bits: torch.Tensor) -> int:
    """How many elements are best worked on at a time where ``bits`` lie."""
    return _ON_GPU if bits.is_cuda else _ON_CPU


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word

"""The hash that SGLang draws seeded samples with; on CPUs it expects it from ``sgl_kernel``.

Without it the first sampled token ends the server. The function is MurmurHash3 (x86, 32 bit,
Austin Appleby, public domain) over four words: both halves of the seed, position and column.
"""

from __future__ import annotations

import torch

_SCHEMA = "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"
_WORD = 0xFFFFFFFF
_LENGTH = 16  # bytes that are hashed
_library: list[torch.library.Library] = []  # the operator lives as long as this


def define() -> None:
    """Make the operator known to torch."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(_SCHEMA)  # type: ignore[no-untyped-call]
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")  # type: ignore[no-untyped-call]
    _library.append(library)


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """Hashes in [0, 2**32) as int64 [rows, columns].

    ``seed`` is uint64 [rows], ``positions`` [rows], ``col_indices`` [columns].
    """
    seed = seed.view(torch.int64).view(-1, 1)
    positions = positions.to(torch.int64).view(-1, 1)
    columns = col_indices.to(torch.int64).view(1, -1)
    state = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions, columns):
        state = _mixed(state, word & _WORD)
    return _finished(state ^ _LENGTH)


# int64 products wrap, but their lower 32 bits are those of the unsigned product.


def _mixed(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _rotated((word * 0xCC9E2D51) & _WORD, 15)
    state = _rotated(state ^ ((word * 0x1B873593) & _WORD), 13)
    return (state * 5 + 0xE6546B64) & _WORD


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD


def _finished(state: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _WORD
    return state ^ (state >> 16)

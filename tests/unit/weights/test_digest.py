"""Digests of tensors: they see any change, add up over shards, and follow changes alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.weights import TensorEntry, digest, root, updated

MODULUS = 1 << 64


def bits_of(size, dtype=np.uint16, seed=0):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, size, dtype)


def slow(name, bits):
    """The formula, in Python's integers."""
    from blake3 import blake3

    salt = int.from_bytes(blake3(name.encode()).digest(8), "little")
    total = 0
    for index, pattern in enumerate(bits.tolist()):
        x = (((index << 32) | pattern) * 0x9E3779B97F4A7C15 + salt) % MODULUS
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % MODULUS
        total += x ^ (x >> 31)
    return total % MODULUS


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_it_is_the_formula(dtype):
    bits = bits_of(40_000, dtype)

    assert digest("layer.weight", bits) == slow("layer.weight", bits)


def test_the_digest_of_nothing_is_zero():
    assert digest("a", np.empty(0, np.uint16)) == 0


@given(cuts=st.lists(st.integers(0, 50_000), max_size=4))
def test_shards_add_up(cuts):
    bits = bits_of(50_000)
    edges = sorted({0, *cuts, bits.size})

    parts = (digest("w", bits[a:b], start=a) for a, b in itertools.pairwise(edges))

    assert sum(parts) % MODULUS == digest("w", bits)


def test_it_follows_changes_alone():
    old = bits_of(100_000)
    at = np.unique(bits_of(500, np.uint32, seed=1).astype(np.int64) % old.size)
    new = old.copy()
    new[at] += 3

    assert updated("w", digest("w", old), at, old[at], new[at]) == digest("w", new)


def test_a_flipped_bit_a_swap_and_a_shift_are_seen():
    bits = bits_of(1000)
    flipped, swapped = bits.copy(), bits.copy()
    flipped[700] ^= 1
    swapped[[3, 800]] = swapped[[800, 3]]

    found = {digest("w", b) for b in (bits, flipped, swapped, np.roll(bits, 1))}

    assert len(found) == 4
    assert digest("v", bits) not in found


def test_a_root_names_names_types_shapes_and_digests_but_no_order():
    a, b = TensorEntry("a", "bfloat16", (2, 3), 5), TensorEntry("b", "bfloat16", (4,), 6)
    others = [
        a._replace(name="c"),
        a._replace(dtype="float32"),
        a._replace(shape=(3, 2)),
        a._replace(digest=7),
    ]

    assert root([a, b]) == root([b, a])
    assert len({root([other, b]) for other in [a, *others]}) == 5

"""The codec of weight changes against other codings of the same data and the entropy bound.

    python -m tests.bench.weights [--elements N]

One run, one thread. Elements of a bfloat16 tensor move by steps along the ordered patterns, at
several densities; ratios are dense bytes over coded bytes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
from backports import zstd

from tinsmith.weights import apply, between, digest
from tinsmith.weights.bits import ordered, unordered

DENSITIES = (0.001, 0.006, 0.018, 0.05, 0.12, 0.4, 0.94, 1.0)
STEPS = np.array([1, -1] * 8 + [2, -2, 3, -5], np.int16)  # nine of ten move by one


def weights(rng, size):
    """Normally distributed, as bfloat16 patterns."""
    bits = (rng.standard_normal(size, np.float32) * 0.028).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def moved(rng, old, density):
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size, np.float32) < density)
    new[at] = unordered(ordered(old[at]) + rng.choice(STEPS, at.size).view(np.uint16))
    return new


def entropy(counts):
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def bound_bytes(old, new):
    """What independent positions and independent steps must cost."""
    at = old != new
    position = entropy(np.bincount(at.astype(np.int64)))
    steps = ordered(new[at]) - ordered(old[at])
    return (old.size * position + at.sum() * entropy(np.unique(steps, return_counts=True)[1])) / 8


def xor_zstd(old, new):
    return len(zstd.compress((old ^ new).tobytes(), level=1))


def index_value(old, new):
    at = np.flatnonzero(old != new)
    return 4 * at.size + 2 * at.size


def measured(rng, old, density):
    new = moved(rng, old, density)
    started = time.perf_counter()
    change = between(old, new)
    encoded = time.perf_counter()
    result = apply(change, old)
    applied = time.perf_counter()
    old.copy()
    copied = time.perf_counter()
    assert np.array_equal(result, new)
    size, bound = len(change.data), bound_bytes(old, new)
    return {
        "density": density,
        "kind": change.kind,
        "ratio": round(old.nbytes / size, 1),
        "ratio_bound": round(old.nbytes / bound, 1),
        "share_of_bound": round(bound / size, 3),
        "bytes_per_change": round(size / change.count, 2),
        "ratio_xor_zstd1": round(old.nbytes / xor_zstd(old, new), 1),
        "ratio_index_value": round(old.nbytes / index_value(old, new), 1),
        "encode_gb_s": round(old.nbytes / (encoded - started) / 1e9, 3),
        "apply_ms": round((applied - encoded) * 1e3, 1),
        "of_that_copying_ms": round((copied - applied) * 1e3, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--elements", type=int, default=64 << 20)
    elements = parser.parse_args().elements
    rng = np.random.default_rng(0)
    old = weights(rng, elements)
    between(old[: 1 << 20], moved(rng, old[: 1 << 20], 0.01))  # warm
    rows = [measured(rng, old, density) for density in DENSITIES]
    started = time.perf_counter()
    digest("w", old)
    digest_s = time.perf_counter() - started
    result = {
        "elements": elements,
        "digest_gb_s": round(old.nbytes / digest_s / 1e9, 3),
        "codec": rows,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

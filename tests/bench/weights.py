"""The codec of weight changes against other codings and the entropy bound, and lineages.

    python -m tests.bench.weights [--elements N] [--versions N]

Codec: one run, one thread. Elements of a bfloat16 tensor move by steps along the ordered
patterns, at several densities; ratios are dense bytes over coded bytes. Lineage: a state of the
shapes of a 135M model goes through a real broker, which syncs every chunk to disk, to a receiver
in the same process; medians over versions, and the slowest. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from backports import zstd

from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.paths import DataDir
from tinsmith.weights import apply, between, digest
from tinsmith.weights.bits import ordered, unordered
from tinsmith.weights.memory import ArrayMemory
from tinsmith.weights.planes import plane
from tinsmith.weights.policy import Policy
from tinsmith.weights.publisher import Publisher, Wanted
from tinsmith.weights.receiver import Receiver, ReceiverSettings
from tinsmith.weights.specs import TensorSpec

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


def shapes_135m():
    """Of SmolLM2-135M: 272 tensors, the output tied to the embedding."""
    found = {"embed": (49152, 576), "norm": (576,)}
    for layer in range(30):
        for name, shape in (
            ("q", (576, 576)),
            ("k", (192, 576)),
            ("v", (192, 576)),
            ("o", (576, 576)),
            ("gate", (1536, 576)),
            ("up", (1536, 576)),
            ("down", (576, 1536)),
            ("norm1", (576,)),
            ("norm2", (576,)),
        ):
            found[f"{layer}.{name}"] = shape
    return {name: TensorSpec("bfloat16", shape) for name, shape in found.items()}


def memory_of(specs, plane_id):
    rule = plane(plane_id)
    arrays = [item for name, spec in specs.items() for item in rule.specs(name, spec).items()]
    width = {"bfloat16": "u2", "float32": "u4"}
    return ArrayMemory({n: np.zeros(s.size, width.get(s.dtype, "u1")) for n, s in arrays})


async def lineage(bus, plane_id, densities, versions):
    rng, specs = np.random.default_rng(0), shapes_135m()
    bits = {name: weights(rng, spec.size) for name, spec in specs.items()}
    wanted = Wanted(
        lineage_id=f"bench-{plane_id.partition('.')[0]}",
        publisher_id="bench",
        content="full",
        policy=Policy(fold=0, full_every=10**6, full_share=1e9),
    )
    copies = {name: array.copy() for name, array in bits.items()}
    publisher = await Publisher.open(bus.lineages, wanted, specs, copies)
    started = time.perf_counter()
    first = await publisher.publish(bits)
    full_s = time.perf_counter() - started
    statuses = asyncio.Queue()
    settings = ReceiverSettings(
        lineage_id=wanted.lineage_id, replica="bench", plane=plane_id, beat_s=1e6, recheck_s=1e6
    )
    receiver = Receiver(bus.lineages, memory_of(specs, plane_id), settings, statuses.put)
    started = time.perf_counter()
    running = asyncio.create_task(receiver.run())
    try:
        await active(statuses, 1)
        result = {
            "plane": plane_id,
            "full_bytes": first.size,
            "publish_full_s": round(full_s, 2),
            "late_join_s": round(time.perf_counter() - started, 2),
            "deltas": [],
        }
        for density in densities:
            bits, row = await deltas((publisher, receiver, statuses), rng, bits, density, versions)
            result["deltas"].append(row)
        return result
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def active(statuses, version):
    async with asyncio.timeout(300):
        while True:
            status = await statuses.get()
            if (status.state, status.version) == ("active", version):
                return status


async def deltas(parts, rng, bits, density, versions):
    publisher, receiver, statuses = parts
    found = {name: [] for name in ("publish", "encode", "stage", "pause", "active", "size")}
    for _ in range(versions):
        bits = {name: moved(rng, array, density) for name, array in bits.items()}
        while receiver._unchecked:  # digests of the version before are not part of this one
            await asyncio.sleep(0.05)
        started = time.perf_counter()
        published = await publisher.publish(bits)
        status = await active(statuses, published.version)
        found["active"].append((time.perf_counter() - started) * 1e3)
        found["publish"].append(published.publish_ms)
        found["encode"].append(published.encode_ms)
        found["stage"].append(status.stage_ms)
        found["pause"].append(status.pause_ms)
        found["size"].append(published.size)
    dense = sum(array.nbytes for array in bits.values())
    row = {"density": density, "bytes": round(statistics.median(found.pop("size")))}
    row["ratio"] = round(dense / row["bytes"], 1)
    for name, values in found.items():
        row[f"{name}_ms"] = round(statistics.median(values), 1)
        row[f"{name}_ms_most"] = round(max(values), 1)
    return bits, row


async def lineages(versions):
    with tempfile.TemporaryDirectory() as folder:
        data = DataDir(Path(folder))
        data.prepare()
        broker = Broker(data.nats, data.run)
        broker.start()
        try:
            blobs = BlobStore.open("", default=Path(folder) / "blobs")
            config = BusConfig(url=broker.url)
            async with Bus.connect(config, name="bench", blobs=blobs) as bus:
                await bus.ensure()
                return [
                    await lineage(bus, plane_id, (0.006, 0.018), versions)
                    for plane_id in ("bf16", "fp8e4m3.b128.pow2.rne.v1")
                ]
        finally:
            broker.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--versions", type=int, default=5)
    options = parser.parse_args()
    elements = options.elements
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
        "lineage_135m": asyncio.run(lineages(options.versions)),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

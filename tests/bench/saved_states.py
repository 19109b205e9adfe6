"""What a state saved for the next owner costs as chunks, against the files of a checkpoint.

    python -m tests.bench.saved_states [--rounds N] [--rank R] [--adapter-only]

An adapter of SmolLM2-135M and all of its weights, each with both moments, in one process: the two
sides take turns, and each round writes to an empty folder. CPU seconds are those of all threads;
wall seconds, which the disk decides, stand beside them. Prints one JSON object.
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

import torch
from tests.bench import shaped

from tinsmith.blobs import BlobStore
from tinsmith.messages.ops import WHOLE, LoraShape
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.executor import Executor


async def as_files(executor, snapshot):
    """As earlier versions did."""
    return await executor._put(to_files(snapshot, with_optimizer=True))


async def as_chunks(executor, snapshot):
    return await executor.store(snapshot)


SIDES = {"files": as_files, "chunks": as_chunks}


def clocked(call):
    cpu, wall = time.process_time(), time.perf_counter()
    done = call()
    return done, time.process_time() - cpu, time.perf_counter() - wall


def one_round(engine, store):
    """CPU and wall seconds of writing and of reading, and what was written."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as folder:
        blobs = BlobStore.open("", default=Path(folder))
        executor = Executor(engine, None, None, blobs, base_model="", patience_s=0)
        kept = [engine.snapshot("m")]
        parts, *writing = clocked(lambda: asyncio.run(store(executor, kept.pop())))

        async def read():
            return {name: await blobs.get(ref) for name, ref in parts.items()}

        files = asyncio.run(read())
        _, *reading = clocked(lambda: engine.restore("m", files, with_optimizer=True))
    return *writing, *reading, len(parts), sum(ref.size for ref in parts.values())


def measured(engine, lora, rounds):
    engine.create("m", lora)
    view = engine.state("m")
    generator = torch.Generator().manual_seed(0)
    for tensor in (view.weights, view.optimizer.exp_avg, view.optimizer.exp_avg_sq):
        tensor.detach().normal_(std=0.02, generator=generator)
    found = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side, store in SIDES.items():
            figures = one_round(engine, store)
            if number:  # the first one warms up
                found[side].append(figures)
    names = ("write_cpu_s", "write_wall_s", "read_cpu_s", "read_wall_s", "parts", "bytes")
    sides = {
        side: dict(zip(names, map(statistics.median, zip(*all_, strict=True)), strict=True))
        for side, all_ in found.items()
    }
    ratios = {
        name: round(sides["chunks"][name] / sides["files"][name], 3)
        for name in ("write_cpu_s", "read_cpu_s")
    }
    return {"numbers": view.weights.numel()} | sides | {"chunks_over_files": ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--adapter-only", action="store_true")
    options = parser.parse_args()
    folder, is_real = shaped.folder()
    shapes = {shaped.NAME: LoraShape(rank=options.rank), f"{shaped.NAME}:full": WHOLE}
    report = {"model": shaped.told(is_real)}
    for name, lora in list(shapes.items())[: 1 if options.adapter_only else 2]:
        engine = TrainingEngine(base_model.load(str(folder), name=name))
        report[name] = measured(engine, lora, options.rounds)
        del engine
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What the log costs: a training step with and without its append, and replay against live speed;
and for how long a copy of the state for a save stops training.

    python -m tests.bench.log [--steps N] [--tiny]

One run, one process, one model. "Without" is the same run with the append alone left out of the
harness; the server has no such switch. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import structlog
import torch
from tests.bench import shaped

from tinsmith import ids, paths
from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus, Encoded, LogWriter
from tinsmith.config import BusConfig
from tinsmith.messages import ops
from tinsmith.messages.base import Tensor, encode
from tinsmith.sealing.seal import PLAIN
from tinsmith_trainer import base_model
from tinsmith_trainer.compute import Compute
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.executor import Executor
from tinsmith_trainer.recovery import Recovery

RANK = 32
ROWS, LENGTH = 2, 64


@asynccontextmanager
async def running(folder, base):
    """A broker, a bus on it, and an executor."""
    data = paths.DataDir(folder)
    data.prepare()
    broker = Broker(data.nats, data.run)
    broker.start()
    blobs = BlobStore.open("", default=folder / "blobs")
    compute = Compute()
    try:
        async with Bus.connect(BusConfig(url=broker.url), name="bench", blobs=blobs) as bus:
            await bus.ensure()
            computing = asyncio.create_task(compute.serve())
            engine = TrainingEngine(base, microbatch_tokens=1024)
            yield bus, Executor(engine, compute, bus, blobs, base_model="bench", patience_s=1)
            computing.cancel()
    finally:
        compute.close()
        broker.kill()


def step_ops():
    """One forward_backward and one optim_step."""
    tokens = np.arange(100, 100 + LENGTH, dtype="<i4")
    datum = ops.Datum(
        tokens=Tensor("int32", (LENGTH,), tokens.tobytes()),
        inputs={"target_tokens": Tensor("int64", (LENGTH,), tokens.astype("<i8").tobytes())},
    )
    return ops.ForwardBackward(data=(datum,) * ROWS, loss_fn="cross_entropy"), ops.OptimStep()


class Run:
    """One model's life: execute an op, then append it or not."""

    def __init__(self, executor, writer):
        self._executor = executor
        self._writer: LogWriter | None = writer
        self.model_id = ids.model_id(ids.new_session_id(), 0)
        self._log = structlog.get_logger()
        self._seq = 0
        self.appends_s = []

    async def do(self, body):
        op = ops.Op(model_id=self.model_id, seq=self._seq, body=body)
        outcome = await self._executor.execute(op, self._log)
        result, state = await outcome.result, await outcome.state_blake3
        if self._writer is not None:
            started = time.perf_counter()
            await self._writer.commit(self._seq, Encoded(encode(op)), result, state_blake3=state)
            self.appends_s.append(time.perf_counter() - started)
        self._seq += 1


async def measure(args):
    folder = Path(tempfile.mkdtemp())
    torch.set_num_threads(1)
    model, _ = shaped.folder()
    base = base_model.load(str(model), name="bench")
    async with running(folder, base) as (bus, executor):
        with_log, without = Run(executor, None), Run(executor, None)
        with_log._writer = await bus.log.take(with_log.model_id, "bench")
        runs = {"with": with_log, "without": without}
        for run in runs.values():
            await run.do(ops.CreateModel(base_model="bench", lora=ops.LoraShape(rank=RANK)))
        seconds = {name: [] for name in runs}
        for _ in range(args.steps):
            for name, run in runs.items():  # in turns: a busy machine disturbs both alike
                started = time.perf_counter()
                for body in step_ops():
                    await run.do(body)
                seconds[name].append(time.perf_counter() - started)
        pauses = await pauses_of_copies(executor, without, args.steps)
        await executor.drop(with_log.model_id)
        recovery = Recovery(with_log.model_id, bus.log, PLAIN, executor, structlog.get_logger())
        started = time.perf_counter()
        recovered = await recovery.run()
        replay_s = time.perf_counter() - started
    return report(seconds, sorted(with_log.appends_s), replay_s, recovered) | pauses


async def pauses_of_copies(executor, run, steps):
    """Every step is followed by a copy of the state, as for a save, and by its digest.

    A copy stops training only where the next step comes to wait for it.
    """
    clock, readings = asyncio.get_running_loop().time, executor._compute.readings
    forward_backward, step = step_ops()
    copies, pauses = [], []
    for _ in range(steps):
        began = clock()
        copying = executor.copy(run.model_id)
        copying.add_done_callback(lambda _, began=began: copies.append(clock() - began))
        await run.do(forward_backward)
        readings.longest_wait_s = 0.0
        await run.do(step)
        pauses.append(readings.longest_wait_s)
        await copying
    return {
        "copy_ms_p50": round(1e3 * statistics.median(copies), 2),
        "copy_ms_max": round(1e3 * max(copies), 2),
        "pause_of_a_copy_ms_p50": round(1e3 * statistics.median(pauses), 2),
        "pause_of_a_copy_ms_max": round(1e3 * max(pauses), 2),
    }


def report(seconds, appends, replay_s, recovered):
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "model": f"{shaped.told(shaped.folder()[1])}, LoRA rank {RANK}, 1 thread",
        "step": f"forward_backward of {ROWS} x {LENGTH} tokens, then optim_step",
        "step_with_log_s": round(medians["with"], 4),
        "step_without_log_s": round(medians["without"], 4),
        "ratio": round(medians["with"] / medians["without"], 4),
        "append_ms_p50": round(1e3 * statistics.median(appends), 2),
        "append_ms_p99": round(1e3 * appends[int(0.99 * len(appends))], 2),
        "replay_against_live": round(sum(seconds["with"]) / replay_s, 3),
        "ops_replayed": recovered.next_seq,
        "replay_equal": recovered.broken is None,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    sys.stdout.write(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a checkpoint costs against torch.save: pause and duration of a save, loading, bytes.

    python -m tests.bench.checkpoint [--rounds N] [--rank R]

One run, one model, one state. A save is a client's save_state: copied, written to the blob store,
synced to disk and committed by a checkpointer in a process of its own. The baseline is what a loop
without a server does: torch.save of weights, moments and step count in float32, synced too, and
torch.load into the tensors that are trained. It stops training for as long as it takes. The sides
take turns; beside wall times stand ratios and CPU seconds of this process, since others may be
busy on the machine. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
import torch
from tests.bench import shaped
from tests.bench.log import LENGTH, ROWS, running, step_ops

from tinsmith import ids
from tinsmith.errors import NotFound, TinsmithError
from tinsmith.messages import ops, table
from tinsmith.messages.checkpoints import GetCheckpoint
from tinsmith.messages.registry import Run
from tinsmith_trainer import base_model
from tinsmith_trainer.state import digest

LIMIT_MS = 50
"""What a save may stop the training of an adapter of rank 32 for."""
STARTS_S = 60


@asynccontextmanager
async def checkpointer(bus, folder):
    """A real one on the same broker and the same blob store."""
    environ = dict(os.environ)
    environ |= {"TINSMITH_NATS_URL": bus._config.url, "TINSMITH_DATA_DIR": str(folder)}
    environ["TINSMITH_BLOBS__URL"] = f"file://{folder / 'blobs'}"
    with (folder / "checkpointer.log").open("wb") as log:
        command = [sys.executable, "-m", "tinsmith", "checkpointer"]
        process = await asyncio.create_subprocess_exec(
            *command, env=environ, stdout=log, stderr=log
        )
    try:
        async with asyncio.timeout(STARTS_S):
            while not await _answers(bus):
                await asyncio.sleep(0.1)
        yield
    finally:
        process.terminate()
        await process.wait()


async def _answers(bus):
    nowhere = ids.CheckpointPath(ids.model_id(ids.new_session_id(), 0), "weights", "none")
    try:
        await bus.call(table.GET_CHECKPOINT, GetCheckpoint(path=str(nowhere)))
    except NotFound:
        return True
    except TinsmithError:
        return False


class Ours:
    """One model on an executor."""

    def __init__(self, executor, model_id):
        self.executor = executor
        self.model_id = model_id
        self._seq = 0

    async def begin(self, body):
        op = ops.Op(model_id=self.model_id, seq=self._seq, body=body)
        self._seq += 1
        return await self.executor.execute(op, structlog.get_logger())

    async def do(self, body):
        outcome = await self.begin(body)
        result = await outcome.result
        await outcome.state_blake3
        if not isinstance(result, ops.ForwardBackwardDone | ops.OptimStepDone) and not hasattr(
            result, "parts"
        ):
            sys.exit(f"{type(body).__name__}: {result}")
        return result

    async def step(self):
        for body in step_ops():
            await self.do(body)

    async def save(self, name):
        """The parts."""
        return (await self.do(ops.SaveWeights(name=name))).parts

    async def save_beside_a_step(self, name):
        """For how long the next optim_step has waited for the save, in seconds.

        As loops have it: step, save, forward_backward, optim_step.
        """
        forward_backward, step = step_ops()
        saving = await self.begin(ops.SaveWeights(name=name))
        await self.do(forward_backward)
        waited_s = await self._waited(step)
        await saving.result
        return waited_s

    async def save_before_a_step(self, name):
        """The same at worst: nothing is between the save and the optim_step."""
        forward_backward, step = step_ops()
        await self.do(forward_backward)
        saving = await self.begin(ops.SaveWeights(name=name))
        waited_s = await self._waited(step)
        await saving.result
        return waited_s

    async def _waited(self, step):
        readings = self.executor._compute.readings
        readings.longest_wait_s = 0.0
        await self.do(step)
        return readings.longest_wait_s

    def copy_cpu_s(self):
        """CPU seconds of the copy that a step may have to wait for, whoever else is busy."""
        engine = self.executor._engine
        engine.spare.keep(engine.snapshot(self.model_id))  # as a save before has left it
        began = time.thread_time()
        engine.snapshot(self.model_id)
        return time.thread_time() - began

    async def load(self, parts):
        await self.executor.restore(self.model_id, parts, with_optimizer=True)


class Baseline:
    """The same tensors, by torch alone."""

    def __init__(self, snapshot, file):
        named, moments = snapshot.layout.named, snapshot.optimizer
        self._file = file
        self.state = {
            "weights": dict(named(snapshot.weights)),
            "exp_avg": dict(named(moments.exp_avg)),
            "exp_avg_sq": dict(named(moments.exp_avg_sq)),
            "step": moments.steps,
        }
        # As separate parameters are: views of one array would be stored as that array, once.
        for group in ("weights", "exp_avg", "exp_avg_sq"):
            self.state[group] = {name: one.clone() for name, one in self.state[group].items()}

    def save(self):
        with self._file.open("wb") as stream:
            torch.save(self.state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        return self._file.stat().st_size

    def load(self):
        found = torch.load(self._file, weights_only=True)
        for group in ("weights", "exp_avg", "exp_avg_sq"):
            for name, tensor in found[group].items():
                self.state[group][name].copy_(tensor)


class Times:
    """Wall and CPU seconds of what was done, by name."""

    def __init__(self):
        self.wall, self.cpu = {}, {}

    async def of(self, name, work):
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        if asyncio.iscoroutine(result):
            result = await result
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)
        self.cpu.setdefault(name, []).append(time.process_time() - cpu)
        return result

    def median(self, name):
        return statistics.median(self.wall[name])


async def measure(args):
    folder = Path(tempfile.mkdtemp())
    torch.set_num_threads(1)
    model, is_real = shaped.folder()
    base = base_model.load(str(model), name="bench")
    async with running(folder, base) as (bus, executor), checkpointer(bus, folder):
        ours = Ours(executor, ids.model_id(ids.new_session_id(), 0))
        await _register(bus, ours.model_id, args.rank)
        lora = ops.LoraShape(rank=args.rank)
        await ours.do(ops.CreateModel(base_model="bench", lora=lora))
        return await rounds(args, ours, folder) | {
            "model": f"{shaped.told(is_real)}, LoRA rank {args.rank}, 1 thread",
            "step": f"forward_backward of {ROWS} x {LENGTH} tokens, then optim_step",
            "rounds": args.rounds,
            "load_average": round(os.getloadavg()[0], 1),
        }


async def _register(bus, model_id, rank):
    run = Run(
        model_id=model_id, session_id=ids.session_of(model_id), owner="bench", base_model="bench",
        created_ns=time.time_ns(), lora=ops.LoraShape(rank=rank),
    )  # fmt: skip
    await bus.table(table.RUNS).create(ids.token(model_id), run)


async def rounds(args, ours, folder):
    times, engine = Times(), ours.executor._engine
    pauses, worst, copies = [], [], []
    await ours.step()  # the first one has things to set up
    for number in range(args.rounds):
        await times.of("step", ours.step)
        pauses.append(
            await times.of("step_and_save", lambda n=number: ours.save_beside_a_step(f"b{n}"))
        )
        worst.append(await ours.save_before_a_step(f"w{number}"))
        copies.append(ours.copy_cpu_s())
        await times.of("torch_step", ours.step)
        baseline = Baseline(await ours.executor.snapshot(ours.model_id), folder / "state.pt")
        torch_bytes = await times.of("torch_save", baseline.save)
        parts = await times.of("save", lambda n=number: ours.save(f"s{n}"))
        before = digest(engine.state(ours.model_id))
        await times.of("load", lambda found=parts: ours.load(found))
        await times.of("torch_load", baseline.load)
        if digest(engine.state(ours.model_id)) != before:
            sys.exit("what was loaded is not what was saved")
    return report(
        times, (pauses, worst, copies), sum(ref.size for ref in parts.values()), torch_bytes
    )


def report(times, waits, our_bytes, torch_bytes):
    pauses, worst, copies = waits
    figures = {
        "pause_ms_p50": 1e3 * statistics.median(pauses),
        "pause_ms_max": 1e3 * max(pauses),
        "pause_at_worst_ms_p50": 1e3 * statistics.median(worst),
        "pause_at_worst_ms_max": 1e3 * max(worst),
        "copy_cpu_ms_p50": 1e3 * statistics.median(copies),
        "pause_limit_ms": LIMIT_MS,
        "pause_at_worst_against_torch_save": statistics.median(worst) / times.median("torch_save"),
        "save_s": times.median("save"),
        "torch_save_s": times.median("torch_save"),
        "save_against_torch_save": times.median("save") / times.median("torch_save"),
        "step_s": times.median("step"),
        "step_with_a_save_beside_it_s": times.median("step_and_save"),
        "step_then_torch_save_s": times.median("torch_step") + times.median("torch_save"),
        "load_s": times.median("load"),
        "torch_load_s": times.median("torch_load"),
        "load_against_torch_load": times.median("load") / times.median("torch_load"),
        "bytes": our_bytes,
        "torch_bytes": torch_bytes,
        "bytes_against_torch": our_bytes / torch_bytes,
    }
    cpu = {name: round(statistics.median(values), 3) for name, values in times.cpu.items()}
    rounded = {name: round(value, 4) for name, value in figures.items()}
    is_within = 1e3 * max(*pauses, statistics.median(copies)) < LIMIT_MS
    return {**rounded, "is_within_limit": is_within, "cpu_s": cpu}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    sys.stdout.write(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1) + "\n")


if __name__ == "__main__":
    main()

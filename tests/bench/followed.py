"""A model that is trained whole, and two samplers that follow every version of it.

    python -m tests.bench.followed [--steps N] [--rates RATE ...] [--model FOLDER] [--plot FILE]
                                   [--python SGLANG]

Steps of reinforcement learning on all weights with AdamW, at rates from 1e-6 to 1e-5, each on rows
that both samplers drew by the version before: the built-in engine and a real SGLang server, in
float32 on this machine, from a lineage in bfloat16 on a real broker. Each version is proven by both
against its root. Prints a table: medians over the steps of a rate, and the most. All of it shares
the machine's cores, trainer and samplers too.

density: share of weights that changed; bytes: of a version, coded; ratio: all weights in bfloat16
over that; share_of_bound: what independent positions and steps must cost, over it; stage: beside
the service; pause: writing and proving; still: all of the time in which nothing can be drawn;
active: from the start of publishing until it is served; apart: most that log-probabilities of the
drawn tokens differ between the trainer, with weights as published, and the sampler, in nats.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import structlog
import torch
from tests.bench.plot import plot
from tests.bench.weights import entropy
from transformers import AutoModelForCausalLM

from tinsmith import model_files, paths
from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.demo import model as demo_model
from tinsmith.messages.sampling import SamplingParams
from tinsmith.messages.weights import PublishedVersion
from tinsmith.paths import DataDir
from tinsmith.weights.bits import ordered
from tinsmith.weights.policy import Policy
from tinsmith.weights.publisher import Publisher, Wanted
from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.state import bits_of
from tinsmith_sampler.engine import Row
from tinsmith_sampler.following import Follower
from tinsmith_sampler.model import TorchOptions
from tinsmith_sampler.sglang.launching import SglangOptions, default_python
from tinsmith_sampler.sglang.server import OwnServer
from tinsmith_sampler.sglang.whole_engine import SglangWholeEngine
from tinsmith_sampler.standing import Standing
from tinsmith_sampler.whole_engine import WholeEngine

RATES = (1e-6, 3e-6, 1e-5)
BOTH = ("torch", "sglang")
ROWS, TOKENS, PROMPT = 2, 16, [504, 1194, 314, 253]
PATIENCE_S = 900.0
COLUMNS = ("density", "bytes", "bytes_per_change", "ratio", "share_of_bound", "publish_ms")
OF_EACH = ("stage_ms", "pause_ms", "still_ms", "active_ms", "apart")


class Trainer:
    """All weights, float32; what is published is rounded to bfloat16."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.bits = self._rounded()

    def specs(self):
        named = self.model.named_parameters()
        return {name: TensorSpec("bfloat16", tuple(one.shape)) for name, one in named}

    def _rounded(self):
        named = self.model.named_parameters()
        return {name: bits_of(one.detach().numpy()) for name, one in named}

    def step(self, drawn, rate):
        """One step towards rows of a higher reward: many different tokens."""
        rewards = torch.tensor([len(set(row.tokens.tolist())) / TOKENS for row in drawn])
        advantages = rewards - rewards.mean() + 0.1 * torch.randn(len(drawn))
        rows = torch.tensor([[*PROMPT, *row.tokens.tolist()] for row in drawn])
        logits = self.model(rows).logits[:, len(PROMPT) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(2, rows[:, len(PROMPT) :, None])[..., 0]
        (-(advantages[:, None] * chosen).mean()).backward()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        old, self.bits = self.bits, self._rounded()
        return old

    def logprobs(self, rows):
        """Of each row's tokens, by the weights that were published."""
        kept = [one.detach().clone() for one in self.model.parameters()]
        tokens = torch.tensor([[*PROMPT, *row.tokens.tolist()] for row in rows])
        with torch.no_grad():
            for one in self.model.parameters():
                one.copy_(one.bfloat16())
            logits = self.model(tokens).logits[:, len(PROMPT) - 1 : -1]
            for one, old in zip(self.model.parameters(), kept, strict=True):
                one.copy_(old)
        chosen = logits.log_softmax(-1).gather(2, tokens[:, len(PROMPT) :, None])
        return chosen[..., 0].numpy()


def bound_bytes(old, new):
    """What independent positions and independent steps must cost."""
    size, steps = 0, []
    for name, before in old.items():
        size += before.size
        at = np.flatnonzero(before != new[name])
        steps.append(ordered(new[name][at]) - ordered(before[at]))
    moves = np.concatenate(steps)
    position = entropy(np.array([moves.size, size - moves.size]))
    return (size * position + moves.size * entropy(np.unique(moves, return_counts=True)[1])) / 8


class Sampler:
    """One follower, and for how long its engine was still."""

    def __init__(self, name, bus, engine, folder, lineage_id):
        self.name, self.engine = name, engine
        self.still_ms = self.active_at = 0.0
        engine.still = self._timed(engine.still)
        engine.patience_s = PATIENCE_S  # all of the weights come first
        options = TorchOptions(model_path=folder, dtype="float32")
        told = {"replica": name, "figures": {}, "standing": Standing({}), "engine": engine}
        self.follower = Follower(bus, options, lineage_id, **told)

    def _timed(self, still):
        @asynccontextmanager
        async def timed():
            started = time.perf_counter()
            async with still():
                yield
            self.still_ms = (time.perf_counter() - started) * 1e3

        return timed

    async def draw(self, version, seed):
        async with self.follower.hold(version) as engine:
            assert engine.root == version.root
            params = SamplingParams(ignore_eos=True)
            prompt = np.array(PROMPT, np.int32)
            rows = [
                Row(
                    request_id=f"{seed}-{index}",
                    index=index,
                    prompt=prompt,
                    adapter=None,
                    params=params,
                    seed=seed + index,
                    max_tokens=TOKENS,
                )
                for index in range(ROWS)
            ]
            return await asyncio.gather(*map(engine.generate, rows))

    async def reached(self, version):
        async with self.follower.hold(version):
            self.active_at = time.perf_counter()

    async def checked(self):
        """Digests of the version before are not part of the next one."""
        while self.follower._receiver._unchecked:
            await asyncio.sleep(0.05)

    def figures(self, started, apart):
        status = self.follower._receiver.status()
        assert status.mismatches == 0
        values = (status.stage_ms, status.pause_ms, self.still_ms)
        values += ((self.active_at - started) * 1e3, apart)
        return {f"{self.name}_{key}": value for key, value in zip(OF_EACH, values, strict=True)}


async def run(bus, options):
    folder = str(model_files.find(options.model).folder)
    trainer = await asyncio.to_thread(Trainer, folder)
    wanted = Wanted(
        lineage_id="bench",
        publisher_id="bench",
        content="full",
        policy=Policy(fold=0, full_every=10**6, full_share=1e9),
    )
    own = {name: array.copy() for name, array in trainer.bits.items()}
    publisher = await Publisher.open(bus.lineages, wanted, trainer.specs(), own)
    server = OwnServer(
        SglangOptions(python=options.python, model_path=folder, is_whole=True, cache_tokens=4096),
        Path(options.folder) / "sglang.log",
    )
    engines = {
        "torch": WholeEngine(TorchOptions(model_path=folder, kv_tokens=4096)),
        "sglang": SglangWholeEngine(folder, lambda _: server, max_rows=8, max_rank=8),
    }
    samplers = [Sampler(name, bus, each, folder, "bench") for name, each in engines.items()]
    async with AsyncExitStack() as held:
        await asyncio.gather(*(sampler.follower.start() for sampler in samplers))
        for sampler in samplers:
            held.push_async_callback(sampler.follower.close)
        version, _, _ = await published(publisher, trainer, samplers)
        drawn, found = await drawn_by(samplers, version, 0), []
        for step in range(options.steps):
            rate = options.rates[step * len(options.rates) // options.steps]
            rows = [row for each in drawn for row in each]
            old = await asyncio.to_thread(trainer.step, rows, rate)
            version, made, started = await published(publisher, trainer, samplers)
            row = {"rate": rate, "step": step} | coded(made, old, trainer.bits)
            drawn = await drawn_by(samplers, version, ROWS * (step + 1))
            apart = await asyncio.to_thread(differences, trainer, drawn)
            for sampler, one in zip(samplers, apart, strict=True):
                row |= sampler.figures(started, one)
            found.append(row)
            sys.stderr.write(f"{ {key: round(value, 6) for key, value in row.items()} }\n")
        return found


async def drawn_by(samplers, version, seed):
    return await asyncio.gather(*(sampler.draw(version, seed) for sampler in samplers))


def differences(trainer, drawn):
    """The most, of each sampler, between what it and the trainer say of its rows."""
    rows = [row for each in drawn for row in each]
    said = np.abs(np.stack([row.logprobs for row in rows]) - trainer.logprobs(rows))
    return [float(one.max()) for one in np.split(said, len(drawn))]


async def published(publisher, trainer, samplers):
    for sampler in samplers:
        await sampler.checked()
    started = time.perf_counter()
    made = await publisher.publish(trainer.bits)
    version = PublishedVersion(lineage_id="bench", version=made.version, root=made.root)
    await asyncio.gather(*(sampler.reached(version) for sampler in samplers))
    return version, made, started


def coded(made, old, new):
    size = sum(array.size for array in new.values())
    return {
        "density": made.changed / size,
        "bytes": made.size,
        "bytes_per_change": made.size / made.changed,
        "ratio": 2 * size / made.size,
        "share_of_bound": bound_bytes(old, new) / made.size,
        "publish_ms": made.publish_ms,
    }


def table(found, rates):
    """Medians and the most, of each rate."""
    names = [*COLUMNS, *(f"{name}_{key}" for name in BOTH for key in OF_EACH)]
    lines = [
        "| | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "|---|" + "---|" * len(rates),
    ]
    for name in names:
        cells = []
        for rate in rates:
            values = [row[name] for row in found if row["rate"] == rate]
            cells.append(f"{statistics.median(values):.4g} ({max(values):.4g})" if values else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="one after another")
    parser.add_argument("--model", help="a folder; without it, the demo's model, which is fetched")
    parser.add_argument("--python", type=Path, default=default_python())
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    options.model = options.model or str(demo_model.fetch(paths.cache_dir()))
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        found = asyncio.run(on_a_broker(Path(folder), options))
    sys.stdout.write(table(found, options.rates))
    if options.plot is not None:
        names = [
            f"{name}_{key}" for name in ("torch", "sglang") for key in ("pause_ms", "active_ms")
        ]
        lines = {name: [row[name] for row in found] for name in (*names, "publish_ms")}
        options.plot.write_text(plot(lines, f"{Path(options.model).name}: ms per version", "step"))


async def on_a_broker(folder, options):
    data = DataDir(folder)
    data.prepare()
    broker = Broker(data.nats, data.run)
    broker.start()
    try:
        blobs = BlobStore.open("", default=folder / "blobs")
        async with Bus.connect(BusConfig(url=broker.url), name="bench", blobs=blobs) as bus:
            await bus.ensure()
            return await run(bus, options)
    finally:
        broker.kill()


if __name__ == "__main__":
    main()

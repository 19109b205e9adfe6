"""What the server costs: a training step through it against the same step in a bare loop.

    python -m tests.bench.step [--steps N] [--rows N] [--length N]

One run, one model, one batch, one number of threads; the two sides take turns, so that a busy
machine disturbs both alike. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from tests.bench.running import Server

from tinsmith import paths
from tinsmith.demo import model as demo_model

RANK = 32
LEARNING_RATE = 1e-4
NOOP_FUTURES = 200


def batch(rows, length, vocab=49_152):
    generator = np.random.default_rng(0)
    return generator.integers(100, vocab - 100, (rows, length + 1))


class Bare:
    """What a researcher would write without a server: transformers, peft, torch.optim."""

    def __init__(self, folder, tokens):
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=RANK, lora_alpha=32, target_modules=targets)
        self.model = get_peft_model(base, config)
        self.optimizer = torch.optim.AdamW(
            (p for p in self.model.parameters() if p.requires_grad),
            lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0,
        )  # fmt: skip
        self.inputs = torch.from_numpy(tokens[:, :-1])
        self.targets = torch.from_numpy(tokens[:, 1:])

    def step(self):
        import torch.nn.functional as F

        logits = self.model(input_ids=self.inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten(), reduction="sum")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Through:
    """The same step with the client."""

    def __init__(self, server, tokens):
        import tinker
        from tinker import types as T

        self.types = T
        service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        name = "HuggingFaceTB/SmolLM2-135M-Instruct"
        self.model = service.create_lora_training_client(
            name, rank=RANK, train_unembed=False
        ).result()
        self.data = [
            T.Datum(
                model_input=T.ModelInput.from_ints(row[:-1].tolist()),
                loss_fn_inputs={"target_tokens": row[1:], "weights": np.ones(len(row) - 1, "f4")},
            )
            for row in tokens
        ]

    def step(self):
        losses = self.model.forward_backward(self.data, "cross_entropy")
        self.optim().result()
        return losses.result().metrics["loss:sum"]

    def optim(self):
        return self.model.optim_step(self.types.AdamParams(learning_rate=LEARNING_RATE))


def timed(call):
    started = time.perf_counter()
    value = call()
    return time.perf_counter() - started, value


def measure(args):
    folder = demo_model.fetch(paths.cache_dir())
    tokens = batch(args.rows, args.length)
    with tempfile.TemporaryDirectory() as data, Server(Path(data), threads=1) as server:
        sides = {"bare": Bare(folder, tokens), "server": Through(server, tokens)}
        rounds = [
            {name: timed(side.step) for name, side in sides.items()} for _ in range(args.steps + 1)
        ]
        idle = sorted(
            timed(lambda: sides["server"].optim().result())[0] for _ in range(NOOP_FUTURES)
        )
    return report(args, rounds, idle)


def report(args, rounds, idle):
    first, *rounds = rounds  # the first one warms up; only in it are both sides' weights equal
    seconds = {name: statistics.median(r[name][0] for r in rounds) for name in ("bare", "server")}
    return {
        "model": "SmolLM2-135M-Instruct float32",
        "batch": f"{args.rows} x {args.length} tokens, LoRA rank {RANK}, 1 thread",
        "step_bare_s": round(seconds["bare"], 3),
        "step_server_s": round(seconds["server"], 3),
        "ratio": round(statistics.median(r["server"][0] / r["bare"][0] for r in rounds), 4),
        "ratios": [round(r["server"][0] / r["bare"][0], 4) for r in rounds],
        "loss_bare": first["bare"][1],
        "loss_server": first["server"][1],
        "noop_future_ms_p50": round(1e3 * statistics.median(idle), 2),
        "noop_future_ms_p99": round(1e3 * idle[int(0.99 * len(idle))], 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(measure(parser.parse_args()), indent=1) + "\n")


if __name__ == "__main__":
    main()

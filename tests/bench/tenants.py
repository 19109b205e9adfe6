"""Tenants that share a trainer: how busy they keep it, and how long each of them waits.

    python -m tests.bench.tenants [--steps N] [--rollout SECONDS] [--mixing MODE] [--plot FILE]

Every client does what reinforcement learning does: it waits for rollouts of a fixed length, then
makes a training step and waits for it. The trainer's busy share is the trainer's own figure. Prints
one JSON object; the table goes to standard error, the plot into a file.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tests.bench import shaped
from tests.bench.running import Server, Tenant, TrainerLoad

CLIENTS = (1, 2, 4, 8)
RANK = 8
ROWS, LENGTH = 2, 32


class Client:
    """One researcher with a policy of its own."""

    def __init__(self, server, seed):
        self._tenant = Tenant(server, rank=RANK)
        generator = np.random.default_rng(seed)
        self._data = [
            self._tenant.datum(
                generator.integers(100, shaped.VOCAB, LENGTH + 1),
                logprobs=np.full(LENGTH, -10.8, "f4"),
                advantages=generator.normal(size=LENGTH).astype("f4"),
            )
            for _ in range(ROWS)
        ]
        self.step()  # warms up

    def step(self):
        """Seconds from asking for a step to its result."""
        began = time.perf_counter()
        self._tenant.step(self._data, "importance_sampling")
        return time.perf_counter() - began

    def loop(self, steps, rollout_s):
        """Seconds of each step."""
        waits = []
        for _ in range(steps):
            time.sleep(rollout_s)  # the rollouts: other machines' work
            waits.append(self.step())
        return waits


def alone_s(client):
    """A step of one client with the trainer to itself."""
    return statistics.median(client.step() for _ in range(3))


def together(clients, load, steps, rollout_s):
    """Figures of one number of clients.

    What is possible is told from the trainer's seconds per step in the same run: either it is
    always busy, or every client always waits for nothing but its rollouts and its own steps.
    """
    with ThreadPoolExecutor(len(clients)) as threads:
        before = load.next()
        began = time.perf_counter()
        waits = list(threads.map(lambda client: client.loop(steps, rollout_s), clients))
        lasted_s = time.perf_counter() - began
        after = load.next()
    busy_s = after["busy_s"] - before["busy_s"]
    step_s = busy_s / (len(clients) * steps)
    per_client = [steps / (sum(own) + steps * rollout_s) for own in waits]
    everyone = [wait for own in waits for wait in own]
    return {
        "clients": len(clients),
        "trainer_busy_share": round(busy_s / lasted_s, 3),
        "busy_share_possible": round(min(1.0, len(clients) * step_s / (step_s + rollout_s)), 3),
        "steps_per_s": round(len(clients) * steps / lasted_s, 4),
        "steps_per_s_per_client": [round(rate, 4) for rate in per_client],
        "slowest_client_of_fastest": round(min(per_client) / max(per_client), 3),
        "wait_per_step_s_p50": round(statistics.median(everyone), 3),
        "wait_per_step_s_max": round(max(everyone), 3),
    }


def measure(args):
    folder, is_real = shaped.folder()
    with (
        tempfile.TemporaryDirectory() as data,
        Server(Path(data), threads=1, model=folder, mixing=args.mixing) as server,
        TrainerLoad(server) as load,
    ):
        clients = [Client(server, seed) for seed in range(max(CLIENTS))]
        step_s = alone_s(clients[0])
        rollout_s = args.rollout or 2 * step_s
        found = [together(clients[:n], load, args.steps, rollout_s) for n in CLIENTS]
        pause_ms = load.next()["pause_ms"]
    return {
        "model": f"{shaped.told(is_real)}, LoRA rank {RANK}, 1 thread",
        "mixing": args.mixing,
        "step": f"importance_sampling of {ROWS} x {LENGTH} tokens, then optim_step",
        "step_alone_s": round(step_s, 3),
        "rollout_s": round(rollout_s, 3),
        "longest_pause_ms": pause_ms,
        "runs": found,
    }


COLUMNS = (
    "clients", "trainer_busy_share", "busy_share_possible", "steps_per_s",
    "slowest_client_of_fastest", "wait_per_step_s_p50", "wait_per_step_s_max",
)  # fmt: skip


def table(runs):
    lines = ["  ".join(COLUMNS)]
    lines += ["  ".join(str(run[name]).rjust(len(name)) for name in COLUMNS) for run in runs]
    return "\n".join(lines) + "\n"


WIDTH, HEIGHT, LEFT, FLOOR = 640, 320, 60, 270


def plot(report):
    """Bars of the busy share beside what the arithmetic allows, as SVG."""
    shapes = []
    for percent in range(0, 101, 25):
        y = FLOOR - 2.2 * percent
        shapes.append(f'<path d="M{LEFT} {y}H{WIDTH - 10}" stroke="#ddd"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{percent} %</text>')
    for index, run in enumerate(report["runs"]):
        x = LEFT + 30 + 140 * index
        for offset, name, colour in (
            (0, "busy_share_possible", "#c9d5e3"), (42, "trainer_busy_share", "#2f6db5"),
        ):  # fmt: skip
            height = 220 * run[name]
            shapes.append(
                f'<rect x="{x + offset}" y="{FLOOR - height:.1f}" width="38" '
                f'height="{height:.1f}" fill="{colour}"/>'
            )
        label = f"{run['clients']} clients, {run['steps_per_s']:g} steps/s"
        shapes.append(f'<text x="{x + 40}" y="{FLOOR + 20}" text-anchor="middle">{label}</text>')
    title = "Busy share of the trainer (dark), and what the arithmetic allows (light)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LEFT}" y="24" font-size="14">{title}</text>{"".join(shapes)}</svg>\n'
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="of each client")
    parser.add_argument("--rollout", type=float, default=0.0, help="seconds; 0: twice a step")
    parser.add_argument("--mixing", choices=("exact", "mixed"), default="exact")
    parser.add_argument("--plot", type=Path, default=Path("build/bench-tenants.svg"))
    args = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")
    report = measure(args)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    args.plot.write_text(plot(report))
    sys.stderr.write(table(report["runs"]) + f"plot: {args.plot}\n")
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

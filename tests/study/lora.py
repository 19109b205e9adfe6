"""Learning rates of adapters and of all weights: the trends of "LoRA Without Regret" at home.

    python -m tests.study.lora [--steps N] [--ranks 1,8,128] [--rates ...] [--quick]

Trains SmolLM2-135M, the demo's model, on the demo's questions: one run for each rank and learning
rate, and for all weights at theirs. The essay's claims are that the best rate of an adapter is
about ten times that of all weights, and nearly the same for every rank. Prints one JSON object;
the table goes to standard error, the plot into a file. ``--quick`` tries the machinery on a tiny
random model, of which nothing can be concluded.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from tests.bench import shaped
from tests.study import sweep
from tests.study.chart import chart
from tests.study.lessons import lessons

from tinsmith.demo import model as demo_model
from tinsmith.paths import cache_dir
from tinsmith.testing import tiny_model

LORA_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
FULL_RATES = (3e-5, 1e-4, 3e-4, 1e-3)


def study(plan, ranks, rates, full_rates, args):
    """All runs, and what they show."""
    tasks = [(plan, rank, rates, args.threads) for rank in ranks]
    tasks.append((plan, 0, full_rates, args.threads))
    if args.processes == 1:
        parts = [*map(of_rank, tasks)]
    else:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.processes, mp_context=spawned) as pool:
            parts = [*pool.map(of_rank, tasks)]
    return [run for _, runs in parts for run in runs], parts[0][0]


def of_rank(task):
    """The runs of one rank, on an engine of their own; and the loss of the untrained model."""
    plan, rank, rates, threads = task
    torch.set_num_threads(threads)
    engine, runs = sweep.engine_for(plan, rank), []
    base_loss = sweep.untrained(plan, rank, engine)
    for run in sweep.runs(plan, rank, sorted(rates), engine):
        sys.stderr.write(
            f"rank {run.rank} at {run.rate:.0e}: {run.held_out:.4f} ({run.seconds:.0f} s)\n"
        )
        runs.append(run)
    return base_loss, runs


def conclusions(found, base_loss):
    """The best rate of every rank, and how they compare; null where nothing was learned."""
    bests = {}
    for rank in sorted({run.rank for run in found}):
        of_rank = [run for run in found if run.rank == rank]
        if any(math.isfinite(run.held_out) for run in of_rank):
            bests[rank] = sweep.best(of_rank)
    fitted = [one.fitted for rank, one in bests.items() if rank]
    return {
        "held_out_untrained": round(base_loss, 4),
        "best": [_rounded(one._asdict()) for one in bests.values()],
        "times_full": {
            str(rank): round(one.fitted / bests[0].fitted, 1)
            for rank, one in bests.items()
            if rank and 0 in bests
        },
        "largest_best_rate_of_ranks_over_smallest": (
            round(max(fitted) / min(fitted), 2) if fitted else None
        ),
        "every_best_is_inside_its_grid": all(one.is_inside for one in bests.values()),
    }


def _rounded(fields):
    return {
        name: (float(f"{value:.4g}") if math.isfinite(value) else None)
        if isinstance(value, float)
        else value
        for name, value in fields.items()
    }


def report(found, concluded, **about):
    runs = [
        _rounded({**run._asdict(), "losses": None})
        | {"losses": [round(loss, 4) for loss in run.losses]}
        for run in found
    ]
    return {**about, "conclusions": concluded, "runs": runs}


def table(found):
    """Held-out losses: a row for each rank, its learning rates across."""
    lines = []
    for rank in sorted({run.rank for run in found}):
        cells = [f"{run.rate:.0e}: {run.held_out:.3f}" for run in found if run.rank == rank]
        lines.append((f"rank {rank}" if rank else "all weights").ljust(12) + "   ".join(cells))
    return "\n".join(lines) + "\n"


def numbers(kind):
    return lambda text: tuple(kind(part) for part in text.split(","))


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="questions of a step")
    parser.add_argument("--most", type=int, help="questions of each kind; else all")
    parser.add_argument("--ranks", type=numbers(int), default=(1, 8, 128))
    parser.add_argument("--rates", type=numbers(float), default=LORA_RATES)
    parser.add_argument("--full-rates", type=numbers(float), default=FULL_RATES)
    parser.add_argument("--seed", type=int, default=0, help="of adapters and of the order")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--processes", type=int, default=2, help="ranks at a time")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, two steps")
    parser.add_argument("--plot", type=Path, default=Path("build/study-lora.svg"))
    args = parser.parse_args(given)
    if args.quick:
        args.steps, args.rows, args.most, args.threads, args.processes = 2, 2, 4, 1, 1
        args.ranks, args.rates, args.full_rates = (1, 8), (1e-3, 1e-2, 1e-1), (1e-4, 1e-3)
    return args


def conduct(args, folder, name):
    plan = sweep.Plan(folder, lessons(folder, args.most), args.steps, args.rows, args.seed)
    found, base_loss = study(plan, args.ranks, args.rates, args.full_rates, args)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    args.plot.write_text(chart(found, f"Held-out loss after {args.steps} steps, {name}"))
    sys.stderr.write(table(found) + f"plot: {args.plot}\n")
    about = {"model": name, "steps": args.steps, "rows": args.rows, "seed": args.seed}
    about["questions"] = [len(kind) for kind in plan.lessons]
    return report(found, conclusions(found, base_loss), **about)


def main():
    args = arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.quick:
        with tempfile.TemporaryDirectory() as place:
            made = conduct(args, tiny_model.build(Path(place)), "tiny random model")
    else:
        folder = demo_model.fetch(cache_dir())
        made = conduct(args, folder, shaped.told(is_real=True))
    sys.stdout.write(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()

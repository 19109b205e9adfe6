"""How fast the trainer is: through the server against a bare torch+peft loop, in one run.

    python -m tests.bench.trainer [--rounds N] [--tokens N]

Eight tenants are measured with passes of one model each and with shared ones (``trainer.mixing``),
against a bare step on the rows of all of them, and, since no bare loop could do that for eight
models, against a bare step for each. The second is what passes of one model each are to be judged
by: ``gemm_flops`` tells how much slower the products of fewer rows are.

Both sides compute on one thread, in processes of their own, and take turns, so that a busy machine
disturbs both alike; ratios are of the CPU seconds of the two processes as well as of wall time.
Prints one JSON object.
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
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tests.bench import shaped
from tests.bench.bare import Bare
from tests.bench.running import Server, Tenant

RANK = 32
RANKS = (8, 16, 32, 8, 16, 32, 8, 16)  # of eight tenants
MIXED = (1 / 32, 1 / 8, 3 / 8, 1)  # of the longest
NOOPS, SMALL_OPS = 100, 8


def rows(count, length, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(100, shaped.VOCAB - 100, (count, length + 1))


def gemm_peak():
    """FLOP/s of one thread in a large float32 product, and in those of the model by tokens."""
    import torch

    torch.set_num_threads(1)
    return {name: _gemm(*shape) for name, shape in {
        "1024^3": (1024, 1024, 1024),
        **{f"{tokens} tokens x 576 x 1536": (tokens, 576, 1536) for tokens in (512, 64, 4)},
    }.items()}  # fmt: skip


def _gemm(m, k, n):
    import torch

    a, b, best = torch.randn(m, k), torch.randn(k, n), 1e9
    for _ in range(20):
        began = time.thread_time()
        torch.mm(a, b)
        best = min(best, time.thread_time() - began)
    return 2 * m * k * n / best


def flops_per_token(length, rank=RANK):
    """4 N + 6 P of a LoRA step, and causal attention; N without the input embedding (tied)."""
    weights, lora = 134_515_008, rank * 305_280
    attention = 12 * 30 * 576 * length / 2
    return 4 * weights + 6 * lora + attention


class Sides:
    """One piece of work done by the server and by the bare loop in turns."""

    def __init__(self, server, bare):
        self._server = server
        self._bare = bare

    def compare(self, tokens, serve, batches, rounds):
        """``serve`` against a bare step on each of ``batches``."""
        self._round(serve, batches)  # warms up
        taken = [self._round(serve, batches) for _ in range(rounds)]
        ratios = {
            kind: [bare[kind] / ours[kind] for ours, bare in taken] for kind in ("s", "cpu_s")
        }
        seconds = {
            side: statistics.median(pair[i]["s"] for pair in taken)
            for i, side in enumerate(("server", "bare"))
        }
        return {
            "tokens": tokens,
            "server_tokens_per_s": round(tokens / seconds["server"], 1),
            "bare_tokens_per_s": round(tokens / seconds["bare"], 1),
            "times_bare": round(statistics.median(ratios["s"]), 3),
            "times_bare_by_cpu": round(statistics.median(ratios["cpu_s"]), 3),
            "spread": [round(ratio, 3) for ratio in sorted(ratios["s"])],
            "spread_by_cpu": [round(ratio, 3) for ratio in sorted(ratios["cpu_s"])],
            "server_cpu_s": round(statistics.median(ours["cpu_s"] for ours, _ in taken), 3),
        }

    def _round(self, serve, batches):
        began, cpu = time.perf_counter(), self._server.trainer_cpu_s()
        serve()
        ours = {
            "s": time.perf_counter() - began,
            "cpu_s": self._server.trainer_cpu_s() - cpu,
        }
        steps = [self._bare.step(batch) for batch in batches]
        return ours, {kind: sum(step[kind] for step in steps) for kind in ours}


def small_ops(tenant, server):
    """The smallest ops, end to end; and CPU milliseconds of the trainer for each."""
    data = [tenant.datum(rows(1, 4)[0])]

    def forward_backward():
        tenant.model.forward_backward(data, "cross_entropy").result()

    def optim_step():
        tenant.optim().result()

    forward_backward()  # warms up
    optim_step()
    passes = [_timed(forward_backward, server) for _ in range(SMALL_OPS)]
    steps = []
    for _ in range(SMALL_OPS):
        forward_backward()
        steps.append(_timed(optim_step, server))
    idle = [_timed(optim_step, server) for _ in range(NOOPS)]
    taken = {"forward_backward_4_tokens": passes, "optim_step": steps, "noop_optim_step": idle}
    return {
        name: {
            "p50_ms": round(statistics.median(ms for ms, _ in each), 1),
            "least_ms": round(min(ms for ms, _ in each), 1),
            "trainer_cpu_ms": round(statistics.mean(cpu_ms for _, cpu_ms in each), 1),
        }
        for name, each in taken.items()
    }


def _timed(call, server):
    began, cpu = time.perf_counter(), server.trainer_cpu_s()
    call()
    return 1e3 * (time.perf_counter() - began), 1e3 * (server.trainer_cpu_s() - cpu)


def together(tenants, data):
    """One step of every tenant, all at once."""
    sent = [tenant.send([datum]) for tenant, datum in zip(tenants, data, strict=True)]
    for losses, stepped in sent:
        losses.result()
        stepped.result()


class Report(dict):
    """The findings, each told on standard error as soon as it is there."""

    def __setitem__(self, name, found):
        super().__setitem__(name, found)
        sys.stderr.write(f"{name}: {json.dumps(found)}\n")


def measure(args):
    folder, is_real = shaped.folder()
    report = Report(model=shaped.told(is_real), threads=1)
    report["gemm_flops"] = {name: round(value) for name, value in gemm_peak().items()}
    with Bare(folder, rank=RANK) as bare:
        with serving(folder) as server:
            exact(Sides(server, bare), server, bare, report, args)
        with serving(folder, mixing="mixed") as server:
            (report["eight_tenants_mixed"],) = eight_tenants(
                Sides(server, bare), server, args, [at_once]
            )
    return report


@contextmanager
def serving(folder, **options):
    with (
        tempfile.TemporaryDirectory() as data,
        Server(Path(data), threads=1, model=folder, **options) as server,
    ):
        yield server


def exact(sides, server, bare, report, args):
    """Everything with the passes of one model each."""
    one = Tenant(server, rank=RANK, train_unembed=False)
    batch = rows(4, args.tokens // 4)
    report["one_tenant"] = one_tenant(sides, one, batch, report, args.rounds)
    report["peak_bytes"] = {
        "server": server.trainer_peak_bytes(), "bare": bare.step(batch)["peak_bytes"],
    }  # fmt: skip
    report["small_ops_rank_32"] = small_ops(one, server)
    bare_small = [bare.step(rows(1, 4)) for _ in range(SMALL_OPS)]
    report["bare_step_of_4_tokens_cpu_ms"] = round(
        1e3 * statistics.mean(step["cpu_s"] for step in bare_small), 1
    )
    report["small_ops_rank_8"] = small_ops(Tenant(server, rank=8, train_unembed=False), server)
    eight = eight_tenants(sides, server, args, [at_once, one_by_one])
    report["eight_tenants"], report["eight_tenants_against_eight_bare_steps"] = eight
    mixed = [rows(1, int(share * args.longest))[0] for share in MIXED]
    ragged = [one.datum(row) for row in mixed]
    report["mixed_lengths_against_padded"] = sides.compare(
        sum(len(row) - 1 for row in mixed), lambda: one.step(ragged), [mixed], args.mixed_rounds
    )


def at_once(batch):
    """All rows in one bare step."""
    return [batch]


def one_by_one(batch):
    """A bare step for each row."""
    return [[row] for row in batch]


def eight_tenants(sides, server, args, splits):
    """A step of each, against bare steps on all of their rows, split in each of these ways."""
    tenants = [Tenant(server, rank=rank, train_unembed=False) for rank in RANKS]
    batch = rows(8, args.tokens // 8)
    shares = [tenant.datum(row) for tenant, row in zip(tenants, batch, strict=True)]
    return [
        sides.compare(args.tokens, lambda: together(tenants, shares), split(batch), args.rounds)
        for split in splits
    ]


def one_tenant(sides, tenant, batch, report, rounds):
    datums = [tenant.datum(row) for row in batch]
    rows, length = batch.shape[0], batch.shape[1] - 1
    found = sides.compare(rows * length, lambda: tenant.step(datums), [batch], rounds)
    flops = rows * length * flops_per_token(length) / found["server_cpu_s"]
    peak = max(report["gemm_flops"].values())
    return found | {"flops": round(flops), "of_gemm_peak": round(flops / peak, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixed-rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512, help="of a batch")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the mixed lengths")
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(measure(parser.parse_args()), indent=1) + "\n")


if __name__ == "__main__":
    main()

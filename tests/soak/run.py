"""``make soak``: many small runs at once, random faults, and what must hold through all of it.

* no run sees an error: back-pressure is for the client, which sends again;
* no process grows by more than 5 % once it is warm (the broker: beside its index and the blocks
  that it has in memory, which it forgets when all is quiet);
* the logs of all runs verify at the end, and every run has got on;
* whoever is told to end does, with code 0, and nobody ends who was not.

In the last two thirds of the time the broker is stopped for seconds but not ended, for its last
life to be long enough to be judged.

Prints JSON on standard output, a table on standard error; ends with 1 when it is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from tests.fault.cluster import Cluster
from tests.integration.conftest import connect
from tests.soak import memory, tenants
from tests.soak.faults import KINDS, ROLES, Stage
from tests.soak.heap import Profiled

from tinsmith.testing import tiny_model

PER_SESSION = 10  # runs of one client
TICK_S = 0.2


def options(arguments=None):
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds from fault to fault")
    parser.add_argument("--roles", nargs="*", choices=ROLES, default=ROLES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--warm", type=float, default=60.0, help="seconds of a process's life")
    parser.add_argument("--folder", type=Path, help="for data and logs, which are kept")
    return parser.parse_args(arguments)


def soak(chosen, folder):
    """All of it; the report."""
    settings = f"max_models = {2 * chosen.runs}"
    profiled = Profiled()
    model = tiny_model.build(folder / "model")
    cluster = Cluster(folder, model, trainer=settings, limits=profiled.limits)
    with ExitStack() as stack:
        stack.callback(cluster.close)
        stage = Stage(cluster, random.Random(chosen.seed))
        clients = _clients(stack, cluster, stage, -(-chosen.runs // PER_SESSION))
        runs = [
            tenants.Tenant(clients[number // PER_SESSION], number, chosen.seed)
            for number in range(chosen.runs)
        ]
        with memory.Watch(stage.processes, cluster.broker, profiled) as watch:
            _train(chosen, stage, runs)
            rows = watch.rows(chosen.warm)
        code, said = cluster.audit("log", "verify", "--all")
        unrest = memory.unrest(profiled)
        stage.end()
    wrong = [*stage.broken, *memory.broken(rows), *unrest, *_of_runs(runs)]
    if code:
        wrong.append(f"logs do not verify: {said}")
    return {
        "minutes": chosen.minutes,
        "seed": chosen.seed,
        "runs": len(runs),
        "steps": sum(run.steps for run in runs),
        "fewest_steps": min(run.steps for run in runs),
        "samples": sum(run.samples for run in runs),
        "longest_wait_s": round(max(run.longest_s for run in runs), 1),
        "faults": dict(stage.done),
        "memory": rows,
        "verified": said.strip().splitlines()[-1:],
        "broken": wrong,
    }


def _clients(stack, cluster, stage, count):
    server = cluster.server(stage.slots["gateway"].node)
    connected = [connect(server) for _ in range(count)]
    found = []
    for one in connected:
        found.append(next(one))
        stack.callback(one.close)
    return found


def _train(chosen, stage, runs):
    """All runs at once, harmed until the time is over, and then left to finish their steps."""
    over = threading.Event()
    pool, futures = tenants.begin(runs, over)
    now = time.monotonic()
    until, next_fault = now + 60 * chosen.minutes, now + chosen.every
    broker_ends_until = now + 20 * chosen.minutes
    while time.monotonic() < until:
        stage.tick()
        if chosen.roles and time.monotonic() >= next_fault:
            is_late = time.monotonic() >= broker_ends_until
            stage.fault(chosen.roles, chosen.kinds, spares_broker=is_late)
            next_fault = time.monotonic() + chosen.every
        time.sleep(TICK_S)
    stage.settle()
    over.set()
    while not all(future.done() for future in futures):
        stage.tick()
        time.sleep(TICK_S)
    pool.shutdown()


def _of_runs(runs):
    wrong = [f"{run.model_id or 'a run'} failed: {run.error}" for run in runs if run.error]
    return wrong + [f"{run.model_id} made no step" for run in runs if not run.steps]


def table(report):
    """The report for people."""
    faults = ", ".join(f"{name} {count}" for name, count in sorted(report["faults"].items()))
    lines = [
        f"{report['runs']} runs, {report['steps']} steps ({report['fewest_steps']} at least), "
        f"{report['samples']} samples; longest wait {report['longest_wait_s']} s",
        f"faults: {faults or 'none'}",
        f"{'process':16} {'pid':>8} {'life s':>8} {'warm MiB':>9} {'end MiB':>9} {'growth':>8}",
    ]
    for row in report["memory"]:
        grown = row["growth"]
        figures = (
            f"{'-':>9} {'-':>9} {'too short':>9}"
            if grown is None
            else f"{row['warm_mib']:9} {row['end_mib']:9} {grown:8.1%}"
        )
        lines.append(f"{row['process']:16} {row['pid']:8} {row['life_s']:8} {figures}")
    return "\n".join([*lines, *(report["broken"] or ["all promises held"])])


def main():
    chosen = options()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = soak(chosen, folder)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    sys.stderr.write(table(report) + f"\nlogs: {folder}\n")
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())

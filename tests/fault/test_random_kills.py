"""Three tenants train while every process is killed again and again: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fault.cluster import replace_killed
from tests.integration.auditing import bus_of
from tests.integration.conftest import connect, start, stop
from tests.integration.steps import datum, new_model, step

from tinsmith.messages import ops

STEPS = 60
KILLS = 10
SERVICES = ("trainer", "gateway", "sampler", "checkpointer", "broker")


class Pace:
    """Spreads the tenants' steps over the kills, so that each kill meets steps on their way."""

    def __init__(self):
        self._kills = 0
        self._changed = threading.Condition()

    def kill_begins(self):
        with self._changed:
            self._kills += 1
            self._changed.notify_all()

    def wait_for(self, step):
        with self._changed:
            self._changed.wait_for(lambda: step < self._kills * STEPS // KILLS)


def train(model, tenant, pace=None):
    """A tenant's whole run: its data and its rate are its own."""
    data = [datum(range(5 + tenant, 20 + tenant)), datum(range(30, 42 + tenant))]
    losses = []
    for n in range(STEPS):
        if pace is not None:
            pace.wait_for(n)
        losses.append(step(model, data, lr=10 ** -(2 + tenant / 2)))
    return losses


def kill_at_random(server, rng, pace):
    """Let some steps go, kill one process in their midst, wait until there is another."""
    pace.kill_begins()
    service = rng.choice(SERVICES)
    replace_killed(server, service)
    return service


async def read_log(server, model_id):
    """(seqs, last state digest) of a run's log."""
    async with bus_of(server) as bus:
        entries = [entry async for entry in bus.log.entries(model_id)]
    records = [entry for entry in entries if isinstance(entry, ops.Record)]
    states = [record.state_blake3 for record in records if record.state_blake3]
    return [record.seq for record in records], states[-1]


def audit(server, *command):
    """An auditor's command against the running installation."""
    options = ["--config", server.folder / "tinsmith.toml", "--data-dir", server.folder / "data"]
    arguments = [sys.executable, "-m", "tinsmith", *command, *map(str, options)]
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.timeout(1500)
def test_killed_at_random_every_run_ends_as_if_it_had_been_alone(tmp_path, model_folder):
    rng = random.Random(20)
    server = start(tmp_path, model_folder=model_folder, extra="[trainer]\nsnapshot_steps = 10\n")
    clients = connect(server)
    client = next(clients)
    models = [new_model(client, seed=tenant) for tenant in range(3)]
    with ThreadPoolExecutor(3) as tenants:
        pace = Pace()
        runs = [tenants.submit(train, model, n, pace) for n, model in enumerate(models)]
        killed = [kill_at_random(server, rng, pace) for _ in range(KILLS)]
        losses = [run.result() for run in runs]
    alone = [new_model(client, seed=tenant) for tenant in range(3)]
    undisturbed = [train(model, n) for n, model in enumerate(alone)]
    logs = [asyncio.run(read_log(server, model.model_id)) for model in (*models, *alone)]
    audits = [audit(server, "log", "verify", "--all")]
    audits += [audit(server, "replay", model.model_id) for model in models]
    audits += [audit(server, "replay", models[0].model_id, "--alone")]
    clients.close()
    stop(server)

    assert losses == undisturbed, killed
    assert [done.returncode for done in audits] == [0] * 5, audits
    assert [seqs for seqs, _ in logs] == [list(range(2 * STEPS + 1))] * 6
    assert [state for _, state in logs[:3]] == [state for _, state in logs[3:]]

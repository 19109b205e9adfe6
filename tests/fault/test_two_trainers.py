"""Two trainers of one base model: who gets which model, and who continues when one is gone."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fault import requests
from tests.fault.cluster import LEASE_S, last_state, owners, records, until
from tests.integration.conftest import MODEL
from tests.integration.steps import datum, new_model, step

from tinsmith import ids
from tinsmith.messages import table
from tinsmith_trainer.config import TrainerConfig

STEPS = 10
TAKE_OVER_S = 15  # what we promise
RECOVERY_S = 5  # of it, to find the model's state again
BEFORE = 4  # steps that are done when it happens


def train(model, tenant, losses):
    """A tenant's whole run; ``losses`` grows with it."""
    data = [datum(range(5 + tenant, 20 + tenant)), datum(range(30, 42 + tenant))]
    for _ in range(STEPS):
        losses.append(step(model, data))
    return losses


async def lease_s(bus):
    """After how many seconds the broker gives a silent trainer's models to another."""
    consumer = f"pool-{ids.pool_token(MODEL)}"
    info = await bus._connection[1].consumer_info(table.PLACEMENTS.stream, consumer)
    return info.config.ack_wait


def held(cluster, models):
    """Which trainer holds each model."""
    return [owners(cluster.log(model.model_id))[-1] for model in models]


class Runs:
    """Tenants that train at once, and how far they are."""

    def __init__(self, pool, models):
        self.losses = [[] for _ in models]
        self._runs = [
            pool.submit(train, model, n, self.losses[n]) for n, model in enumerate(models)
        ]

    def have_made(self, steps):
        return all(len(losses) >= steps for losses in self.losses)

    def ended(self):
        return [run.result() for run in self._runs]


def undisturbed(client, tenants):
    """(losses, model) of the same runs when nothing happens."""
    models = [new_model(client, seed=tenant) for tenant in range(tenants)]
    return [train(model, n, []) for n, model in enumerate(models)], models


def check_equal(cluster, models, alone):
    """Each run's log is exact and ends in the very state of the run that was left alone."""
    logs = [cluster.log(model.model_id) for model in models]
    assert [[r.seq for r in records(log)] for log in logs] == [list(range(2 * STEPS + 1))] * len(
        models
    )
    assert [last_state(log) for log in logs] == [
        last_state(cluster.log(model.model_id)) for model in alone
    ]


def audited(cluster, model):
    return [cluster.audit("log", "verify", "--all"), cluster.audit("replay", model.model_id)]


@pytest.mark.timeout(600)
def test_a_killed_trainers_models_are_continued_by_the_other(new_cluster, clients, record_property):
    cluster = new_cluster(trainer="snapshot_steps = 4")
    gateway, *trainers = cluster.start("gateway", "trainer", "trainer")
    client = clients(cluster.server(gateway))
    models = [new_model(client, seed=tenant) for tenant in range(2)]
    with ThreadPoolExecutor(2) as pool:
        runs = Runs(pool, models)
        until(lambda: runs.have_made(BEFORE), "the first steps")
        before = held(cluster, models)
        killed = next(t for t in trainers if t.instance == before[0])
        killed.kill()
        killed_at = time.monotonic()
        until(lambda: killed.instance not in held(cluster, models), "another owner")
        record_property("take_over_s", time.monotonic() - killed_at)
        losses = runs.ended()
    after = held(cluster, models)
    expected, alone = undisturbed(client, 2)

    assert cluster.ask(lease_s) == LEASE_S
    assert TrainerConfig().placement_timeout_s <= TAKE_OVER_S - RECOVERY_S
    assert set(after) == {t.instance for t in trainers} - {killed.instance}
    assert losses == expected
    check_equal(cluster, models, alone)
    done = audited(cluster, models[0])
    assert [code for code, _ in done] == [0, 0], done


@pytest.mark.timeout(600)
def test_a_trainer_that_slept_over_its_lease_is_fenced_and_nothing_is_doubled(new_cluster, clients):
    cluster = new_cluster(trainer="snapshot_steps = 4")
    gateway, *trainers = cluster.start("gateway", "trainer", "trainer")
    client = clients(cluster.server(gateway))
    models = [new_model(client, seed=tenant) for tenant in range(2)]
    with ThreadPoolExecutor(2) as pool:
        runs = Runs(pool, models)
        until(lambda: runs.have_made(BEFORE), "the first steps")
        before = held(cluster, models)
        asleep = next(t for t in trainers if t.instance == before[0])
        asleep.pause()
        until(lambda: asleep.instance not in held(cluster, models), "another owner")
        asleep.resume()
        losses = runs.ended()
        lost = before.count(asleep.instance)
        until(
            lambda: len(asleep.events("model lost to another trainer")) >= lost, "the fenced owner"
        )
    expected, alone = undisturbed(client, 2)

    assert losses == expected
    check_equal(cluster, models, alone)
    done = audited(cluster, models[0])
    assert [code for code, _ in done] == [0, 0], done


@pytest.mark.timeout(600)
def test_models_go_where_there_is_room_and_one_too_many_waits_with_a_reason(new_cluster, clients):
    cluster = new_cluster(trainer="max_models = 2")
    gateway, *trainers = cluster.start("gateway", "trainer", "trainer")
    server = cluster.server(gateway)
    leaving, staying = clients(server), clients(server)
    first = new_model(leaving)
    models = [first, *(new_model(staying, seed=n) for n in range(1, 4))]
    spread = Counter(held(cluster, models))
    promise = requests.create(server, requests.new_session(server))
    told = requests.why_waiting(server, promise["request_id"])
    leaving.close("success").result()
    made = requests.result(server, promise["request_id"])

    assert spread == {trainer.instance: 2 for trainer in trainers}
    assert "2 running, with 4 models" in told
    assert made["model_id"] == promise["model_id"]

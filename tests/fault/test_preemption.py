"""Preemption: trainers that are told to stop again and again through a whole run.

Leases are far longer than any wait here: a model that had to wait for one to run out would fail
the test. A life is as long as it takes to commit a step or two, which is less than the 20 seconds
of the promise, and each stop meets requests on their way.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fault.cluster import PATIENCE_S, READY_PATIENCE_S, last_state, owners, records, until
from tests.integration.steps import datum, new_model

from tinsmith.messages import ops

ROUNDS = 4
STEPS = 8  # of each round, sent at once
AFTER = 2  # records of a round that are there when its trainer is told to stop
LEASE_S = 120


class Tenant:
    """A run whose steps are released in rounds; undisturbed, all at once."""

    def __init__(self, model):
        self.model = model
        self.model_id = model.model_id
        self._released = threading.Semaphore(0)

    def release(self):
        self._released.release()

    def train(self):
        """The losses of the whole run."""
        return [loss for n in range(ROUNDS) for loss in self._round(n)]

    def _round(self, n):
        from tinker import types as T

        self._released.acquire()
        sent = []
        for step in range(STEPS):
            first = 5 + n + step
            data = [datum(range(first, first + 12)), datum(range(30, 40 + step))]
            # A second pass before the step: a stop between them meets half a gradient.
            passes = [self.model.forward_backward([one], "cross_entropy") for one in data]
            sent.append((passes, self.model.optim_step(T.AdamParams(learning_rate=1e-2))))
        losses = []
        for passes, stepped in sent:
            losses += [one.result(READY_PATIENCE_S).metrics["loss:sum"] for one in passes]
            stepped.result(READY_PATIENCE_S)
        return losses


class Machines:
    """The trainers that run; who is preempted is started again, while another goes on."""

    def __init__(self, cluster, count, drain_s):
        self._cluster = cluster
        self._settings = {"placement_timeout_s": LEASE_S, "drain_s": drain_s, "threads": 1}
        self._begun = [cluster.begin("trainer", **self._settings) for _ in range(count)]
        self._nodes = []
        self.settle()
        self.stopped = []

    def settle(self):
        """Wait until all of them work."""
        self._nodes += [self._cluster.started(*one) for one in self._begun]
        self._begun = []

    def preempt(self, instance):
        """Tell the trainer of that name to stop; its exit code."""
        self.settle()
        node = next(one for one in self._nodes if one.instance == instance)
        node.process.send_signal(signal.SIGTERM)
        code = node.process.wait(PATIENCE_S)
        self._nodes.remove(node)
        self.stopped.append(node)
        self._begun.append(self._cluster.begin("trainer", **self._settings))
        return code


def states(entries):
    return [entry for entry in entries if isinstance(entry, ops.StateSaved)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("count", "drain_s"),
    [
        pytest.param(1, 60, id="one-starts-again"),
        pytest.param(2, 60, id="two-take-turns"),
        pytest.param(2, 0, id="no-grace-at-all"),
    ],
)
def test_a_run_goes_on_by_itself_through_every_preemption(new_cluster, clients, count, drain_s):
    cluster = new_cluster()
    (gateway,) = cluster.start("gateway")
    machines = Machines(cluster, count, drain_s)
    client = clients(cluster.server(gateway))
    tenant = Tenant(new_model(client))
    codes = []
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(tenant.train)
        for number in range(ROUNDS):
            done = len(records(cluster.log(tenant.model_id)))
            tenant.release()
            until(
                lambda there=done + AFTER: len(records(cluster.log(tenant.model_id))) >= there,
                f"the first records of round {number}",
                READY_PATIENCE_S,
            )
            codes.append(machines.preempt(owners(cluster.log(tenant.model_id))[-1]))
        machines.settle()
        losses = run.result(READY_PATIENCE_S)
    alone = Tenant(new_model(client))
    for _ in range(ROUNDS):
        alone.release()
    undisturbed = alone.train()
    log, expected = cluster.log(tenant.model_id), cluster.log(alone.model_id)
    verified = cluster.audit("log", "verify", "--all")

    assert codes == [0] * ROUNDS
    assert losses == undisturbed
    assert [r.seq for r in records(log)] == list(range(3 * STEPS * ROUNDS + 1))
    assert [r.seq for r in records(expected)] == [r.seq for r in records(log)]
    assert [r.state_blake3 for r in records(log)] == [r.state_blake3 for r in records(expected)]
    assert last_state(log) == last_state(expected)
    assert len(set(owners(log))) == ROUNDS + 1
    assert verified[0] == 0, verified
    if drain_s:
        assert all(node.events("model left to another trainer") for node in machines.stopped)
        assert states(log)

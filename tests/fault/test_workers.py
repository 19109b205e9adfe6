"""Several gateway processes at one address: any of them may die, and all of them end together."""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import pytest
from tests.fault.cluster import until
from tests.integration.steps import X, Y, new_model, step
from tinker import types as T

STEPS = 6
HEARTBEATS = 20


def workers(node):
    """The processes that answer, by their ids."""
    children = Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children")
    return set(map(int, children.read_text().split()))


def listeners(node):
    """Instances that have said that they are ready, restarted ones too."""
    return {said["instance"] for said in node.events("ready")}


def is_answering(server):
    with urllib.request.urlopen(f"{server.base_url}/healthz", timeout=30) as answer:
        return answer.status == 200


@pytest.mark.timeout(600)
def test_a_run_through_two_workers_goes_on_when_one_is_killed(new_cluster, clients):
    cluster = new_cluster()
    gateway, sampler, _, _ = (
        *cluster.start("gateway", workers=2),
        *cluster.start("sampler", "trainer", "checkpointer"),
    )
    server = cluster.server(gateway)
    first = workers(gateway)
    client = clients(server)
    killed, spared = new_model(client), new_model(client)
    losses = [step(killed) for _ in range(STEPS // 2)]
    pending = [killed.forward_backward([X, Y], "cross_entropy") for _ in range(2)]
    os.kill(min(first), signal.SIGKILL)
    for future in pending:
        future.result()
    killed.optim_step(T.AdamParams(learning_rate=1e-2)).result()
    until(lambda: len(workers(gateway)) == 2 and len(listeners(gateway)) == 3, "another worker")
    losses += [step(killed) for _ in range(STEPS // 2)]
    drawn = (
        killed.save_weights_and_get_sampling_client()
        .result()
        .sample(T.ModelInput.from_ints([5, 6, 7]), 1, T.SamplingParams(max_tokens=4))
    )
    undisturbed = [step(spared) for _ in range(STEPS // 2)]

    assert losses[: STEPS // 2] == undisturbed
    assert losses[-1] < losses[0]
    assert len(drawn.result().sequences[0].tokens) > 0
    assert min(first) not in workers(gateway)
    assert all(is_answering(server) for _ in range(HEARTBEATS))
    assert sampler.is_running


@pytest.mark.timeout(300)
def test_sigterm_ends_all_workers_and_their_address(new_cluster):
    cluster = new_cluster()
    (gateway,) = cluster.start("gateway", workers=2)
    server, running = cluster.server(gateway), workers(gateway)
    assert is_answering(server)
    gateway.process.send_signal(signal.SIGTERM)

    assert gateway.process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)
    assert len(gateway.events("stopped")) == len(running) == 2
    with pytest.raises(OSError, match="refused"):
        is_answering(server)


@pytest.mark.timeout(300)
def test_all_workers_end_with_their_parent(new_cluster):
    cluster = new_cluster()
    (gateway,) = cluster.start("gateway", workers=2)
    running = workers(gateway)
    gateway.kill()

    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running), "the workers' end")

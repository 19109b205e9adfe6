"""Processes die in the middle of a training loop; the client notices nothing but a delay."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.integration.conftest import connect
from tests.integration.steps import X, Y, new_model, probe
from tinker import types as T

PATIENCE_S = 60.0


@pytest.fixture
def fragile_client(fragile_server):
    yield from connect(fragile_server)


def until_another(server, service, old):
    """Wait until ``up`` tells of a new process."""
    deadline = time.monotonic() + PATIENCE_S
    while server.pids.get(service, old) == old:
        assert time.monotonic() < deadline, f"{service} was not restarted"
        time.sleep(0.05)


def send_step(model):
    """A step that was promised and not waited for."""
    losses = model.forward_backward([X, Y], "cross_entropy")
    return losses, model.optim_step(T.AdamParams(learning_rate=1e-2))


@pytest.mark.timeout(400)
def test_a_run_whose_processes_are_killed_ends_as_if_nothing_had_happened(
    fragile_server, fragile_client
):
    services = ("trainer", "gateway", "checkpointer", "broker")
    killed, spared = new_model(fragile_client), new_model(fragile_client)
    for service in services:
        old = fragile_server.pids[service]
        pending = send_step(killed)
        fragile_server.kill(service)
        for future in pending:
            future.result()
        until_another(fragile_server, service, old)
    for _ in services:
        for future in send_step(spared):
            future.result()

    np.testing.assert_array_equal(probe(killed), probe(spared))


@pytest.mark.timeout(200)
def test_a_sample_survives_the_death_of_its_sampler(fragile_server, fragile_client):
    base = fragile_client.create_sampling_client(base_model="tiny/llama").result()
    prompt, params = T.ModelInput.from_ints([5, 6, 7]), T.SamplingParams(max_tokens=64, stop=[])
    seeded = params.model_copy(update={"seed": 4})
    before = base.sample(prompt, 1, seeded).result().sequences[0].tokens
    old = fragile_server.pids["sampler"]
    pending = [base.sample(prompt, 1, seeded) for _ in range(4)]
    fragile_server.kill("sampler")
    after = [future.result().sequences[0].tokens for future in pending]
    until_another(fragile_server, "sampler", old)

    assert after == [before] * 4

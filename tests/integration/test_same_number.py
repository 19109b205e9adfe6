"""One number, two bodies: the second is refused, by any gateway, whatever the first has become."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.integration.conftest import connect
from tests.integration.steps import new_model
from tests.integration.test_wire import chunk

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
PROTOBUF = "application/x-protobuf"


@pytest.fixture
def fragile_client(fragile_server):
    yield from connect(fragile_server)


@contextmanager
def second_gateway(server):
    """Another gateway of the same installation, as ``server`` with its own address."""
    told = json.loads((server.folder / "data" / "run" / "up.json").read_text())
    environ = {
        "PATH": os.environ["PATH"],
        "TINSMITH_NATS_URL": told["nats_url"],
        "TINSMITH_DATA_DIR": str(server.folder / "data"),
        "TINSMITH_GATEWAY__PORT": "0",
        "TINSMITH_LOGS__FORMAT": "json",
    }
    command = [sys.executable, "-m", "tinsmith", "gateway"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        lines = map(json.loads, process.stderr)
        url = next(line["url"] for line in lines if line.get("event") == "ready")
        try:
            yield replace(server, base_url=url)
        finally:
            process.terminate()
            for _ in lines:  # what it says until its end must find a reader
                pass


def step(model, seq, rate):
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}}


def post_step(server, model, seq, rate):
    return server.post("optim_step", step(model, seq, rate))


def require_taken(server, model, seq, rate, *, other):
    """Number ``seq`` is the step of ``rate``: it may come again, with ``other`` it is refused."""
    status, told = post_step(server, model, seq, other)
    assert status == 400, told
    assert (
        f"seq_id: request {seq} of model {model} was sent before, as optim_step" in told["detail"]
    )
    assert "another learning_rate" in told["detail"]
    body = chunk(model, seq, 5)
    status, told = server.post("forward_backward", body, content_type=PROTOBUF)
    assert (status, "and is forward_backward now" in told["detail"]) == (400, True)
    status, told = post_step(server, model, seq, rate)
    assert (status, told["request_id"]) == (200, f"{model}:{seq}")


def result(server, model, seq):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        status, answer = server.post("retrieve_future", {"request_id": f"{model}:{seq}"})
        if status == 200:
            return answer
    pytest.fail(f"request {seq} has no result")


def test_it_is_refused_while_queued_and_when_done_by_two_gateways(server, client):
    model = new_model(client).model_id
    with second_gateway(server) as other:
        post_step(server, model, 2, 0.25)  # waits for 1
        for gateway in (other, server):
            require_taken(gateway, model, 2, 0.25, other=0.5)
        post_step(other, model, 1, 0.125)
        done = result(server, model, 2)
        for gateway in (other, server):
            require_taken(gateway, model, 1, 0.125, other=0.5)
            require_taken(gateway, model, 2, 0.25, other=0.5)

        assert result(other, model, 2) == done
        assert done["metrics"]["log_seq:unique"] == 2
        assert result(server, model, 1)["metrics"]["optimizer_steps"] == 0  # without a gradient


def test_a_new_model_under_a_taken_number_is_refused(server, client):
    model = new_model(client)
    session, _, number = model.model_id.split(":")
    lora = {"rank": 8, "seed": 0, "train_unembed": True, "train_mlp": True, "train_attn": True}
    asked = {"session_id": session, "model_seq_id": int(number), "base_model": "tiny/llama"}
    same = server.post("create_model", asked | {"lora_config": lora})
    other = server.post("create_model", asked | {"lora_config": lora | {"rank": 16}})

    assert (same[0], same[1]["model_id"]) == (200, model.model_id)
    assert (other[0], "model_seq_id" in other[1]["detail"]) == (400, True)


def restarted(server, service):
    old = server.pids[service]
    server.kill(service)
    deadline = time.monotonic() + PATIENCE_S
    while server.pids.get(service, old) == old:
        assert time.monotonic() < deadline, f"{service} was not restarted"
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_it_is_refused_in_a_trainer_s_hands_and_after_restarts(fragile_server, fragile_client):
    server, model = fragile_server, new_model(fragile_client).model_id
    post_step(server, model, 1, 0.125)
    done = result(server, model, 1)
    os.kill(server.pids["trainer"], signal.SIGSTOP)
    post_step(server, model, 2, 0.25)
    require_taken(server, model, 2, 0.25, other=0.5)
    for service in ("broker", "gateway"):
        restarted(server, service)
    require_taken(server, model, 1, 0.125, other=0.5)
    require_taken(server, model, 2, 0.25, other=0.5)
    os.kill(server.pids["trainer"], signal.SIGCONT)

    assert result(server, model, 2)["metrics"]["log_seq:unique"] == 2
    assert result(server, model, 1) == done
    require_taken(server, model, 2, 0.25, other=0.5)

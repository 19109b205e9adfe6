"""`tinsmith status`, `runs`, `models` and `doctor` on a running server, as operators use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tests.integration.conftest import MODEL, connect
from tests.integration.steps import new_model, step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PATIENCE_S = 90.0
ROLES = {"gateway", "trainer", "sampler", "checkpointer"}


def tinsmith(server, *args, **environ):
    command = [sys.executable, "-P", "-m", "tinsmith", *args]
    command += ["--config", server.folder / "tinsmith.toml", "--data-dir", server.folder / "data"]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", "COLUMNS": "80", **environ},
    )  # fmt: skip


def told(server, *args):
    shown = tinsmith(server, *args, "--json")
    assert shown.stdout, shown.stderr
    return shown.returncode, json.loads(shown.stdout)


def until(look, is_so):
    deadline = time.monotonic() + PATIENCE_S
    while not is_so(found := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"never came about: {found}")
    return found


@pytest.fixture
def trained(client):
    """A live run with one step and a checkpoint; its id."""
    model = new_model(client)
    step(model)
    model.save_state("first").result()
    return model


def test_status_of_a_server_that_works(server, trained):
    # Once: a process may have missed its turn to say that it lives, on a machine with much to do.
    code, found = until(lambda: told(server, "status"), lambda one: one[0] == 0)

    assert code == 0
    assert found["problems"] == []
    assert {service["service"] for service in found["services"]} == ROLES
    (run,) = (one for one in found["runs"] if one["model_id"] == trained.model_id)
    assert run["is_live"]
    assert run["is_held"]
    assert run["last_op"] >= 2
    assert run["checkpoints"] == 1
    assert {queue["name"] for queue in found["queues"]} == {"ops", "placements", "samples", "held"}
    assert found["broker"]["storage"] > 0


def test_status_for_people(server, trained):
    shown = tinsmith(server, "status")

    assert shown.stderr == ""
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for word in ("Services", "trainer-", "Queues", "TS_LOG", trained.model_id[:8]):
        assert word in shown.stdout


def test_status_watches_until_it_is_interrupted(server):
    command = [sys.executable, "-m", "tinsmith", "status", "--watch", "--json"]
    command += ["--config", str(server.folder / "tinsmith.toml")]
    command += ["--data-dir", str(server.folder / "data")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        seen = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

    assert code == 0
    assert seen[0]["at_s"] < seen[1]["at_s"]


def test_runs_are_listed_and_shown(server, trained):
    code, runs = told(server, "runs")
    assert code == 0
    assert trained.model_id in {run["model_id"] for run in runs}

    code, run = told(server, "runs", "show", trained.model_id)
    assert code == 0
    assert run["base_model"] == MODEL
    assert [one["path"] for one in run["checkpoints"]] == [
        f"tinker://{trained.model_id}/weights/first"
    ]
    shown = tinsmith(server, "runs", "show", trained.model_id)
    assert "first" in shown.stdout
    assert trained.model_id in shown.stdout
    assert "live" in tinsmith(server, "runs", "--all").stdout


def test_a_run_that_is_not_there(server):
    shown = tinsmith(server, "runs", "show", "nosuchrun")

    assert shown.returncode == 2
    assert "no run begins with 'nosuchrun'" in shown.stderr


def test_models_and_who_serves_them(server):
    code, found = until(lambda: told(server, "models"), lambda one: one[0] == 0)

    assert code == 0
    (model,) = found
    assert (model["name"], model["files"]) == (MODEL, "ok")
    assert len(model["trainers"]) == 1
    assert len(model["samplers"][""]) == 1
    assert MODEL in tinsmith(server, "models").stdout


def test_doctor_finds_nothing_wrong(server):
    _, found = told(server, "doctor")
    levels = {finding["check"]: finding["level"] for finding in found}

    assert levels["broker"] == "ok"
    assert levels["ports"] == "ok"
    assert levels["blob store"] == "ok"
    assert levels["master key"] == "ok"
    assert levels[f"model {MODEL}"] == "ok"
    shown = tinsmith(server, "doctor")
    assert shown.returncode == 0, shown.stdout


def test_what_has_died_is_told(fragile_server):
    server = fragile_server
    for client in connect(server):
        trained = new_model(client)
        step(trained)
        os.kill(server.process.pid, signal.SIGSTOP)  # nobody starts it again
        try:
            server.kill("trainer")
            code, found = until(
                lambda: told(server, "status"),
                lambda one: any("no trainer" in problem["what"] for problem in one[1]["problems"]),
            )
        finally:
            os.kill(server.process.pid, signal.SIGCONT)

    assert code == 1
    assert not found["runs"][0]["is_held"]
    assert "tinsmith trainer" in found["problems"][0]["remedy"]


def test_without_a_broker_the_code_is_2(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-m", "tinsmith", "status", "--data-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", "TINSMITH_NATS_URL": "nats://127.0.0.1:9"},
    )  # fmt: skip

    assert shown.returncode == 2
    assert "tinsmith up" in shown.stderr

"""Sessions, projects and use, through the client's own methods and its command line."""

from __future__ import annotations

import json
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from tests.integration.management.conftest import until
from tests.integration.steps import X, Y, new_model, step
from tinker import types as T

pytestmark = pytest.mark.slow

PROMPT = T.ModelInput.from_ints([5, 6, 7])


@pytest.fixture
def command(managed, tmp_path):
    """The client's command line, in this process: loading it anew each time takes long."""
    from tinker.cli.__main__ import main_cli

    environ = {"HOME": str(tmp_path), "TINKER_BASE_URL": managed.base_url}
    environ |= {"TINKER_API_KEY": managed.api_key, "TINKER_TELEMETRY": "0", "COLUMNS": "200"}

    def run(*words):
        told = CliRunner(env=environ).invoke(main_cli, words)
        assert told.exit_code == 0, told.output
        return told.output

    return run


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_sessions_are_searched_and_moved_between_projects(login):
    service, rest = login("alice", user_metadata={"trial": "7"}, project_id="first")
    model = new_model(service)
    session_id = model.model_id.partition(":")[0]
    rest.assign_session_project(session_id, "second").result()
    request = T.SessionSearchRequest(user_metadata={"trial": "7"}, project_ids=["second"])

    found = rest.search_sessions(request).result().sessions
    runs = rest.list_training_runs(project_id="second").result().training_runs

    assert [(s.session_id, s.status.type) for s in found] == [(session_id, "active")]
    assert [run.training_run_id for run in runs] == [model.model_id]
    assert rest.list_training_runs(project_id="first").result().training_runs == []
    assert session_id in rest.list_sessions().result().sessions


@pytest.mark.timeout(200)
def test_what_was_used_is_counted_once_even_if_the_counter_dies(managed, login, tinker):
    service, _ = login("alice", project_id="metered")
    model = new_model(service)
    step(model, data=(X, Y))
    model.save_state("kept").result()
    sampler = service.create_sampling_client(base_model="tiny/llama").result()
    sampler.sample(PROMPT, 2, T.SamplingParams(max_tokens=4, stop=[])).result()
    admin = tinker.AdminClient(base_url=managed.base_url, api_key=managed.api_key)
    expected = {"training": 50, "sampling_sample": 8, "checkpoint": 1, "prefill": 3}

    until(lambda: _used(admin, "metered") == expected)
    old = managed.pids["checkpointer"]
    managed.kill("checkpointer")
    until(lambda: managed.pids.get("checkpointer", old) != old)
    step(model, data=(X, Y))

    until(lambda: _used(admin, "metered") == expected | {"training": 100})
    storage = admin.get_current_checkpoint_storage_usage("metered").result().data
    assert [item.checkpoint_count for item in storage] == [1]
    until(lambda: _hours(admin, "metered", "storage"))


def test_the_command_line_manages_checkpoints(alice, command):
    model = new_model(alice[0])
    path = model.save_state("by-hand").result().path

    assert model.model_id in command("run", "list")
    assert "tiny/llama" in command("run", "info", model.model_id)
    assert "weights/by-hand" in command("checkpoint", "list", "--run-id", model.model_id)
    command("checkpoint", "publish", path)
    assert "weights/by-hand" in command("checkpoint", "info", path)
    command("checkpoint", "unpublish", path)
    command("checkpoint", "set-ttl", path, "--ttl", "3600")
    command("checkpoint", "set-ttl", path, "--remove")
    command("checkpoint", "delete", path, "-y")
    assert "by-hand" not in command("checkpoint", "list", "--run-id", model.model_id)


def test_the_command_line_tells_of_server_and_use(command):
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [f"{now + timedelta(hours=hours):%Y-%m-%dT%H:00:00Z}" for hours in (-1, 1)]

    assert "tiny/llama" in command("model", "list")
    command("auth", "status")
    command("billing", "usage", *window)
    command("billing", "checkpoint-storage")


def test_a_trace_of_a_session_is_fetched_without_a_key(alice, command, tmp_path):
    model = new_model(alice[0])
    step(model)
    session_id = model.model_id.partition(":")[0]
    file = tmp_path / "trace"

    with urllib.request.urlopen(alice[1].export_session_trace(session_id).result()) as answer:
        events = json.load(answer)["traceEvents"]
    command("session", "export-trace", session_id, "--output", str(file))

    assert [e["name"] for e in events if e["ph"] == "i"][:3] == ["op", "forward_backward", "op"]
    assert json.loads(file.read_text())["traceEvents"]


def _events(admin, project):
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    first, end = now - timedelta(hours=1), now + timedelta(hours=1)
    data = admin.get_billing_usage(first, end).result().data
    return [event.event_info for event in data if event.project_id == project]


def _used(admin, project):
    """Counts by kind over the last two hours; prompts however they came about."""
    counts = {}
    for info in _events(admin, project):
        kind = "prefill" if info.type == "sampling_prefill" else info.type
        if kind != "storage":
            counts[kind] = counts.get(kind, 0) + (
                info.count if kind == "checkpoint" else info.token_count
            )
    return counts


def _hours(admin, project, kind):
    return sum(i.gigabyte_hours for i in _events(admin, project) if i.type == kind)

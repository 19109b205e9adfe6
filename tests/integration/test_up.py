"""`tinsmith up` as a user runs it: the real command, broker and services, signals and crashes.

Most tests start only the services without tensors: the others differ in what they do once up.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tinsmith.cli import plan
from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from tinsmith.broker import Broker

pytestmark = pytest.mark.integration

LIGHT = "gateway,checkpointer"
PROMPT_S = 10.0  # an error is told within 5 s; twice that on a machine that is busy with tests


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def processes_of(folder):
    """Ids of all processes that know this data folder, by their arguments or environment."""
    name = os.fsencode(folder)
    return [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit()
        and int(process.name) != os.getpid()
        and any(name in read(process / part) for part in ("cmdline", "environ"))
    ]


def read(path):
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return b""


def until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return result


class Up:
    """One `tinsmith up` on a data folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "log"
        self.ready_file = folder / "ready.json"
        self.process: subprocess.Popen[str] | None = None

    def start(self, *args, services=LIGHT, **environ):
        environ = os.environ | {"TINSMITH_GATEWAY__PORT": "0"} | environ
        command = [sys.executable, "-P", "-m", "tinsmith", "up", "--data-dir", str(self.data)]
        command += ["--services", services, "--ready-file", str(self.ready_file), *args]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ
            )
        return self

    def ready(self, timeout_s=30.0):
        """The content of the ready file, once it is there."""

        def appeared():
            assert self.process.poll() is None, self.log.read_text()
            return self.ready_file.exists()

        until(appeared, timeout_s)
        return json.loads(self.ready_file.read_text())

    def fails(self):
        """Exit code and last line of an `up` that must end by itself, soon."""
        code = self.process.wait(20)
        return code, self.log.read_text().splitlines()[-1]

    def signal(self, number):
        self.process.send_signal(number)
        return self.process.wait(25)


@pytest.fixture
def up(tmp_path):
    made = Up(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    if made.process is not None:
        made.process.stdout.close()


def test_ready_means_that_the_gateway_answers_with_the_key_that_was_made(up):
    ready = up.start().ready()

    request = urllib.request.Request(f"{ready['base_url']}/api/v1/healthz")
    request.add_header("X-API-Key", Path(ready["api_key_file"]).read_text().strip())
    with urllib.request.urlopen(request, timeout=5) as response:
        assert response.status == 200


def test_the_ready_file_names_every_process(up):
    ready = up.start().ready()

    assert set(ready["pids"]) == {"up", "broker", "gateway", "checkpointer"}
    assert all(map(is_alive, ready["pids"].values()))
    assert ready["pids"]["up"] == up.process.pid


def test_workers_of_the_gateway_share_its_address_and_are_replaced(up):
    ready = up.start(TINSMITH_GATEWAY__WORKERS="2").ready()
    names = {"up", "broker", "gateway:1", "gateway:2", "checkpointer"}
    assert set(ready["pids"]) == names
    os.kill(ready["pids"]["gateway:1"], signal.SIGKILL)

    def replaced():
        now = json.loads(up.ready_file.read_text())
        return now if now["pids"]["gateway:1"] != ready["pids"]["gateway:1"] else None

    later = until(replaced, 90.0)
    assert set(later["pids"]) == names
    assert later["base_url"] == ready["base_url"]
    with urllib.request.urlopen(f"{later['base_url']}/healthz", timeout=60) as response:
        assert response.status == 200


def test_the_user_is_told_what_to_export(up):
    ready = up.start().ready()
    up.signal(signal.SIGTERM)

    said = up.process.stdout.read()
    assert f"export TINKER_BASE_URL={ready['base_url']}\n" in said
    assert f'export TINKER_API_KEY="$(cat {up.data / "api-key"})"\n' in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything_in_order_and_leaves_nothing(up, number):
    ready = up.start().ready()

    assert set(ready["pids"].values()) <= set(processes_of(up.data))
    assert up.signal(number) == 0
    assert processes_of(up.data) == []
    assert not up.ready_file.exists()
    log = up.log.read_text().splitlines()
    assert [line.split()[0] for line in log if "] stopped" in line] == ["gateway", "checkpointer"]
    assert not any("did not stop in time" in line for line in log)


def test_sigkill_leaves_nothing_running(up):
    up.start().ready()
    assert len(processes_of(up.data)) == 4
    up.process.kill()
    up.process.wait()

    until(lambda: not processes_of(up.data), timeout_s=5)


def test_sigkill_during_the_start_leaves_nothing_running(up):
    up.start()
    until(lambda: len(processes_of(up.data)) == 4)
    up.process.kill()
    up.process.wait()

    until(lambda: not processes_of(up.data), timeout_s=5)


def test_after_sigkill_the_same_folder_comes_up_again_with_the_same_key(up):
    key = Path(up.start().ready()["api_key_file"]).read_text()
    up.process.kill()
    up.process.wait()
    up.process.stdout.close()

    again = up.start().ready()
    assert Path(again["api_key_file"]).read_text() == key


def test_a_second_up_on_the_folder_is_refused_with_the_pid(up, tmp_path):
    ready = up.start().ready()
    second = Up(tmp_path / "second")
    second.folder.mkdir()
    second.data = up.data
    began = time.monotonic()

    code, line = second.start().fails()
    second.process.stdout.close()

    assert code == 2
    assert f"in use by another 'tinsmith up' (pid {ready['pids']['up']})" in line
    assert time.monotonic() - began < PROMPT_S
    assert all(map(is_alive, ready["pids"].values()))


@pytest.mark.parametrize("label", ["gateway", "checkpointer", "broker"])
def test_a_crashed_process_is_started_again_and_the_file_says_so(up, label):
    before = up.start().ready()
    os.kill(before["pids"][label], signal.SIGKILL)

    def restarted():
        now = json.loads(up.ready_file.read_text())
        return now["pids"][label] != before["pids"][label] and now

    now = until(restarted)
    assert now["nats_url"] == before["nats_url"]
    others = set(before["pids"]) - {label}
    assert {name: now["pids"][name] for name in others} == {n: before["pids"][n] for n in others}


def test_a_signal_during_the_start_leaves_nothing(up):
    up.start()
    until((up.data / "run" / "nats.conf").exists)

    assert up.signal(signal.SIGTERM) == 0
    assert not up.ready_file.exists()
    assert processes_of(up.data) == []


def test_a_broker_given_by_url_is_used_and_not_stopped(up, broker):
    ready = up.start(TINSMITH_NATS_URL=broker.url).ready()

    assert ready["nats_url"] == broker.url
    assert "broker" not in ready["pids"]
    up.signal(signal.SIGTERM)
    assert broker.poll() is None


def assert_refused(up, *parts, began):
    code, line = up.fails()

    assert code == 2
    assert line.startswith("tinsmith up: error: ")
    for part in parts:
        assert part in line
    assert "Traceback" not in up.log.read_text()
    assert processes_of(up.data) == []
    assert time.monotonic() - began < PROMPT_S


def test_a_taken_gateway_port_is_named(up):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        up.start("--port", str(port))

        assert_refused(up, "gateway", str(port), "TINSMITH_GATEWAY__PORT", began=began)
    assert not (up.data / "run" / "up.json").exists()


def test_a_taken_broker_port_is_named(up):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        began = time.monotonic()
        up.start("--nats-port", port)

        assert_refused(up, port, "--nats-port", began=began)


def test_a_missing_broker_binary_is_named(up):
    began = time.monotonic()
    up.start(NATS_SERVER_BIN="/absent/nats-server")

    assert_refused(up, "NATS_SERVER_BIN", "/absent/nats-server", began=began)


def test_an_old_broker_binary_is_refused(up, tmp_path):
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho 'nats-server: v2.9.10'\n")
    old.chmod(0o755)
    began = time.monotonic()
    up.start(NATS_SERVER_BIN=str(old))

    assert_refused(up, "2.9.10", str(old), "2.12", "tinsmith[broker]", began=began)


def test_a_folder_of_a_newer_version_is_refused(up):
    up.data.mkdir()
    (up.data / "VERSION").write_text('{"format": 99, "tinsmith": "9.9.9"}')
    began = time.monotonic()
    up.start()

    assert_refused(up, "format 99", "9.9.9", "--data-dir", began=began)


def test_a_broker_that_does_not_answer_is_named(up):
    began = time.monotonic()
    up.start(TINSMITH_NATS_URL="nats://127.0.0.1:9", TINSMITH_BUS__CONNECT_TIMEOUT_S="1")

    assert_refused(up, "nats://127.0.0.1:9", began=began)


def test_a_model_that_is_not_there_is_named(up):
    began = time.monotonic()
    models = '[{name = "org/m", path = "/absent/model"}]'
    up.start(services="trainer", TINSMITH_MODELS=models)

    assert_refused(up, "org/m", "/absent/model", "[[models]]", began=began)


def test_json_logs_stay_json(up):
    up.start(TINSMITH_LOGS__FORMAT="json").ready()
    up.signal(signal.SIGTERM)

    lines = [json.loads(line) for line in up.log.read_text().splitlines()]
    assert {"gateway", "checkpointer", "up"} <= {line["service"] for line in lines}


def test_no_key_and_no_token_is_ever_logged(up):
    ready = up.start(TINSMITH_LOGS__LEVEL="debug").ready()
    token = ready["nats_url"].partition("://")[2].partition("@")[0]
    key = Path(ready["api_key_file"]).read_text().strip()
    up.signal(signal.SIGTERM)

    said = up.log.read_text() + up.process.stdout.read()
    assert len(token) == 32
    assert token not in said
    assert key not in said


def test_all_four_services_of_a_model_come_up_and_leave_nothing(up, tmp_path):
    model = tiny_model.build(tmp_path / "model")
    models = f'[{{name = "tiny/llama", path = "{model}"}}]'
    up.start(services="gateway,trainer,sampler,checkpointer", TINSMITH_MODELS=models)

    ready = up.ready(timeout_s=100)

    assert set(ready["pids"]) == {"up", "broker", *plan.SERVICES}
    assert up.signal(signal.SIGTERM) == 0
    assert processes_of(up.data) == []


def alone(service, broker: Broker, data: Path):
    """A service in a terminal of its own; its process and the first line of its ready pipe."""
    reader, writer = os.pipe()
    environ = os.environ | {
        "TINSMITH_NATS_URL": broker.url,
        "TINSMITH_DATA_DIR": str(data),
        "TINSMITH_GATEWAY__PORT": "0",
        "TINSMITH_GATEWAY__API_KEYS": '["tml-test"]',
        "TINSMITH_READY_FD": str(writer),
    }
    command = [sys.executable, "-P", "-m", "tinsmith", service]
    process = subprocess.Popen(command, env=environ, pass_fds=(writer,), stderr=subprocess.DEVNULL)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return process, json.loads(pipe.readline())["ready"]


@pytest.mark.parametrize("service", ["gateway", "checkpointer"])
def test_every_service_runs_alone_against_a_broker_given_by_url(service, broker, tmp_path):
    process, ready = alone(service, broker, tmp_path / "alone")

    assert ready["service"] == service
    process.terminate()
    assert process.wait(10) == 0


def test_a_service_alone_without_broker_ends_with_one_line_within_5_seconds(tmp_path):
    environ = os.environ | {"TINSMITH_NATS_URL": "nats://tok@127.0.0.1:9", "HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "tinsmith", "checkpointer"]
    began = time.monotonic()
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("tinsmith checkpointer: error: bus.url: ")
    assert "Traceback" not in ended.stderr
    assert "tok@" not in ended.stderr
    assert time.monotonic() - began < PROMPT_S

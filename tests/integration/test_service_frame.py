"""`run_service`: what a service's process does around its own work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tinsmith.messages.table import SERVICE_ALIVE

pytestmark = pytest.mark.integration

FRAME = """
import asyncio, os, sys
from tinsmith.config import load
from tinsmith.errors import StartupError
from tinsmith.service import run_service

async def main(context):
{body}

sys.exit(run_service("checkpointer", main, load(None, os.environ)))
"""
SERVE = "await context.ready(base_models=('m',))\nawait context.stopping.wait()"


class Service:
    """A process whose service runs ``body``."""

    def __init__(self, body, broker, folder, **environ):
        self._reader, writer = os.pipe()
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        environ = (
            os.environ
            | {
                "TINSMITH_NATS_URL": broker.url,
                "TINSMITH_DATA_DIR": str(folder / "service"),
                "TINSMITH_READY_FD": str(writer),
            }
            | environ
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", FRAME.format(body=indented)],
            env=environ,
            pass_fds=(writer,),
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writer)

    def ready(self):
        with os.fdopen(self._reader) as pipe:
            return json.loads(pipe.readline())["ready"]

    def end(self, number=None):
        if number is not None:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=20)
        return self.process.returncode, said


@pytest.fixture
def service(broker, tmp_path):
    started = []

    def start(body, **environ):
        started.append(Service(body, broker, tmp_path, **environ))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_readiness_is_told_to_the_parent_once(service):
    ready = service(SERVE).ready()

    url = ready.pop("metrics_url")

    assert url.startswith("http://127.0.0.1:")
    assert ready == {"service": "checkpointer", "base_models": ["m"], "url": ""}


def got(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_is_not_ready_while_the_broker_is_away_and_works_all_the_same(service, broker):
    url = service(SERVE).ready()["metrics_url"]
    assert got(f"{url}/readyz") == (200, {"status": "ok"})

    broker.kill()
    until(lambda: got(f"{url}/readyz")[0] == 503)
    assert "message broker cannot be reached" in got(f"{url}/readyz")[1]["detail"]
    assert got(f"{url}/healthz") == (200, {"status": "ok"})

    broker.start()
    until(lambda: got(f"{url}/readyz")[0] == 200)


def test_it_is_not_ready_while_it_starts_and_while_it_is_in_trouble(service):
    body = "print(context.metrics_url, flush=True, file=sys.stderr)\nawait asyncio.sleep(60)"
    starting = service(body)
    url = starting.process.stderr.readline().strip()
    assert got(f"{url}/readyz")[1]["missing"] == ["it is still starting"]

    in_trouble = service(f"context.trouble = 'no room'\n{SERVE}").ready()["metrics_url"]
    assert got(f"{in_trouble}/readyz")[1]["missing"] == ["no room"]


def test_a_metrics_port_that_is_taken_ends_the_start(service):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = service(SERVE, TINSMITH_METRICS__PORT=port).end()

    assert code == 2
    assert f"metrics.port {port} is taken" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_code_0(number, service):
    running = service(SERVE)
    running.ready()

    code, said = running.end(number)

    assert code == 0
    assert json.loads(said.splitlines()[-1])["event"] == "stopped"


def test_a_signal_before_it_listens_ends_it_too(service, broker):
    broker.pause()
    running = service(SERVE, TINSMITH_BUS__CONNECT_TIMEOUT_S="60")
    until_handles_signals(running.process.pid)

    code, _ = running.end(signal.SIGTERM)
    broker.resume()

    assert code == 0


def test_a_signal_while_a_thread_loads_a_model_does_not_wait_for_it(service, tmp_path):
    loading = tmp_path / "loading"
    body = "import time\n" + f"open({str(loading)!r}, 'w').close()\n"
    running = service(body + "await asyncio.to_thread(time.sleep, 100)")
    while not loading.exists():
        pass
    began = time.monotonic()

    code, _ = running.end(signal.SIGTERM)

    assert code == 0
    assert time.monotonic() - began < 20


def until_handles_signals(pid):
    caught = 1 << (signal.SIGTERM - 1)
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        if int(status.partition("SigCgt:")[2].split()[0], 16) & caught:
            return


def test_a_start_up_error_is_one_line_and_code_2(service):
    code, said = service("raise StartupError('model: two\\nlines')").end()

    assert code == 2
    assert said.splitlines()[-1] == "tinsmith checkpointer: error: model: two lines"
    assert "Traceback" not in said


def test_an_unforeseen_error_is_logged_with_its_traceback_and_code_1(service):
    code, said = service("raise KeyError('surprise')").end()

    assert code == 1
    assert "Traceback" in json.loads(said.splitlines()[-1])["exception"]


def test_an_error_after_it_was_ready_is_no_start_up_error(service):
    code, said = service("await context.ready()\nraise StartupError('late')").end()

    assert code == 1
    assert "late" in json.loads(said.splitlines()[-1])["exception"]


def test_ending_unasked_is_a_failure(service):
    code, said = service("await context.ready()").end()

    assert code == 1
    assert "nobody told it to stop" in said


def test_a_connection_closed_for_good_is_code_3(service):
    body = "await context.ready()\nawait context.bus._client.close()\nawait asyncio.sleep(60)"
    code, said = service(body).end()

    assert code == 3
    assert "broker lost" in said


def test_a_second_signal_cancels_what_does_not_end(service):
    running = service("await context.ready()\nawait asyncio.sleep(60)")
    running.ready()
    running.process.terminate()

    code, _ = running.end(signal.SIGINT)

    assert code == 1


def test_a_dead_parent_is_not_outlived(service):
    gone = subprocess.Popen(["true"])
    gone.wait()

    code, _ = service(SERVE, TINSMITH_PARENT_PID=str(gone.pid)).end()

    assert code == 1


def test_a_ready_descriptor_that_is_not_open_is_named(service):
    code, said = service(SERVE, TINSMITH_READY_FD="99").end()

    assert code == 1
    assert "TINSMITH_READY_FD: '99'" in said


async def test_it_says_that_it_is_alive_from_ready_on(service, bus):
    heard = asyncio.Queue()
    subscription = await bus.listen(SERVICE_ALIVE, heard.put_nowait)
    running = service(f"context.load['models'] = 2.0\n{SERVE}")

    first = await asyncio.wait_for(heard.get(), 10)
    second = await asyncio.wait_for(heard.get(), 10)
    await subscription.close()
    running.end(signal.SIGTERM)

    assert first == second
    assert (first.service, first.base_models, first.load) == ("checkpointer", ("m",), {"models": 2})

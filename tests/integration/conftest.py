"""The whole server as a user runs it: `tinsmith up` on a small model, and the real client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from tinsmith.testing import tiny_model

MODEL = "tiny/llama"
START_PATIENCE_S = 300.0
CLIENT_WARNINGS = (
    # The client's own; what it has deprecated is tried as well, for scripts go on calling it.
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore::UserWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@dataclass(frozen=True)
class Server:
    """A running `tinsmith up`."""

    base_url: str
    api_key: str
    folder: Path
    process: subprocess.Popen

    @property
    def pids(self):
        """Of the services, by name; changes when one is restarted."""
        return json.loads((self.folder / "ready.json").read_text())["pids"]

    def kill(self, service):
        """As a crash or an operator would."""
        os.kill(self.pids[service], signal.SIGKILL)

    def post(self, path, body, *, content_type="application/json"):
        """(status, decoded JSON) of a raw POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-API-Key": self.api_key, "Content-Type": content_type}
        request = urllib.request.Request(f"{self.base_url}/api/v1/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")


def start(folder, *, model_folder, extra=""):
    """Start a server in ``folder`` and wait until it is ready."""
    config = folder / "tinsmith.toml"
    config.write_text(
        f'[[models]]\nname = "{MODEL}"\npath = "{model_folder}"\n'
        f'tokenizer_id = "{model_folder}"\n{extra}'
    )
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tinsmith", "up", "--config", config, "--port", "0"]
    command += ["--data-dir", folder / "data", "--ready-file", ready]
    with (folder / "server.log").open("ab") as log:  # the child has its own handle
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
    deadline = time.monotonic() + START_PATIENCE_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail((folder / "server.log").read_text()[-4000:])
        time.sleep(0.05)
    told = json.loads(ready.read_text())
    key = Path(told["api_key_file"]).read_text().strip()
    return Server(told["base_url"], key, folder, process)


def stop(server):
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(30)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny_model.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(tmp_path_factory, model_folder):
    """One server for all tests that do no harm to it."""
    running = start(tmp_path_factory.mktemp("server"), model_folder=model_folder)
    yield running
    stop(running)


@pytest.fixture
def fragile_server(tmp_path, model_folder):
    """A server of the test's own, to be killed in parts."""
    running = start(tmp_path, model_folder=model_folder)
    yield running
    stop(running)


@pytest.fixture
def client(server):
    """A ServiceClient of the unmodified SDK."""
    yield from connect(server)


def connect(server):
    os.environ["TINKER_TELEMETRY"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tinker
    service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
    yield service
    service.close("success").result()


def pytest_collection_modifyitems(items):
    """Every test here talks to real processes; the client warns about itself."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
            for entry in CLIENT_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(entry))

"""A real SGLang server for a whole session of tests, started as the launcher says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tinsmith import lifeline
from tinsmith_sampler.sglang import launching
from tinsmith_sampler.sglang.process import free_port

START_PATIENCE_S = 600.0  # it imports for half a minute on a machine that is idle


@dataclass(frozen=True)
class Running:
    """Where it is, and what it serves."""

    url: str
    key: str
    model: Path
    options: launching.SglangOptions
    folder: Path  # that the server has for what it exchanges


def options(model, **own):
    """Of a server that is small in everything."""
    small = {
        "python": launching.default_python(),
        "cache_tokens": 8192,
        "max_rows": 8,
        "max_adapters": 4,
        "max_lora_rank": 16,
    }
    return launching.SglangOptions(model_path=str(model), **(small | own))


def serve(folder, chosen):
    """A generator for a fixture: the server runs until it goes on."""
    port, key, log = free_port(), "a-key-of-tests", folder / "sglang.log"
    sockets = Path(tempfile.mkdtemp(prefix="sglang-"))
    with log.open("ab") as output:
        process = subprocess.Popen(
            launching.command(chosen, port),
            env=launching.environment(chosen, key, sockets),
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lifeline.tied_to(os.getpid()),  # noqa: PLW1509 - two C calls
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, f"{url}/health", log)
        yield Running(url, key, Path(chosen.model_path), chosen, sockets)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(sockets)


def _wait_ready(process, url, log):
    deadline = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=30):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(log.read_text(errors="replace")[-4000:])

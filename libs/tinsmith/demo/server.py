"""The demo's server: ``tinsmith up`` as a child process, with a configuration of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.demo.model import NAME
from tinsmith.errors import ServerError, StartupError
from tinsmith.lifeline import tied_to

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG_FILE = "tinsmith.toml"
LOG_FILE = "server.log"
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0  # longer than `tinsmith up` gives its own processes
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Address:
    """What a client needs to know."""

    base_url: str
    api_key_file: Path
    config: Path
    """What to start the server with, should it have been stopped."""


def write_config(data_dir: Path, model: Path) -> Path:
    """The file that ``tinsmith up --config`` needs to start this server, now and later."""
    lines = [
        "# Written by `tinsmith demo`.",
        f"data_dir = {_quoted(str(data_dir))}",
        "",
        "[[models]]",
        f"name = {_quoted(NAME)}",
        f"path = {_quoted(str(model))}",
        "context_length = 2048",
    ]
    path = data_dir / CONFIG_FILE
    path.write_text("\n".join(lines) + "\n")
    return path


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # JSON's strings are strings in TOML too


@contextlib.contextmanager
def running(config: Path) -> Iterator[Address]:
    """Start the server, wait until it is ready, and stop it at the end.

    To be entered in the main thread, where SIGTERM then means what Ctrl-C does. The server's output
    goes to a file beside ``config``.

    Raises:
        StartupError: it did not start.
        ServerError: it ended while the block was running, which is interrupted.
    """
    data_dir = config.parent
    log, ready_file = data_dir / LOG_FILE, data_dir / "ready.json"
    ready_file.unlink(missing_ok=True)
    stopping = threading.Event()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = _start(config, log, ready_file)
    try:
        ready = _when_ready(process, log, ready_file)
        watch = (process, stopping, threading.get_ident())
        threading.Thread(target=_interrupt_at_end, args=watch, daemon=True).start()
        key_file = Path(ready["api_key_file"])
        yield Address(base_url=ready["base_url"], api_key_file=key_file, config=config)
    except KeyboardInterrupt:
        if process.poll() is None:
            raise
        raise ServerError(f"the server has ended: {_last_line(log)}; see {log}") from None
    finally:
        stopping.set()
        _stop(process)
        signal.signal(signal.SIGTERM, previous)


def _start(config: Path, log: Path, ready_file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "tinsmith", "up", "--config", str(config), "--port", "0"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--data-dir", str(config.parent), "--ready-file", str(ready_file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the demo, which then stops the server once: twice would kill it.
            process_group=0,
            preexec_fn=tied_to(os.getpid()),  # noqa: PLW1509 - made for this, takes no lock
        )


def _when_ready(process: subprocess.Popen[bytes], log: Path, ready_file: Path) -> dict[str, str]:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not ready_file.exists():
        if process.poll() is not None:
            raise StartupError(f"the server did not start: {_last_line(log)}; see {log}")
        if time.monotonic() > deadline:
            raise StartupError(
                f"the server was not ready after {READY_TIMEOUT_S:.0f} s: {_last_line(log)}; "
                f"see {log}"
            )
        time.sleep(_POLL_S)
    ready: dict[str, str] = json.loads(ready_file.read_bytes())
    return ready


def _interrupt_at_end(
    process: subprocess.Popen[bytes], stopping: threading.Event, waiting_thread: int
) -> None:
    """The client would wait minutes for a server that is gone."""
    process.wait()
    if not stopping.is_set():
        # Not SIGINT, which is ignored in what a script runs in the background.
        signal.pthread_kill(waiting_thread, signal.SIGTERM)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")

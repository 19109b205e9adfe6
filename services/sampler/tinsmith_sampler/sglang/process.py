"""One run of an SGLang server: a process group that is started, gets ready, and ends whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith import lifeline
from tinsmith.errors import StartupError
from tinsmith_sampler.sglang import launching
from tinsmith_sampler.sglang.client import SglangClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith_sampler.sglang.launching import SglangOptions

READY_S = 1800.0  # a large model is read from a disk first
LOG_BYTES = 16 << 20  # a longer log is put aside at the next start; one is kept
_POLL_S = 0.5
_TOLD_LINES = 15
_TOLD_WIDTH = 300
_TOLD_BYTES = 16 << 10


class ServerProcess:
    """A server, from its start to its end. It ends with us, however we end."""

    def __init__(self, options: SglangOptions, log: Path) -> None:
        self._options = options
        self._log = log
        self._key = secrets.token_urlsafe(24)
        self._folder = ""
        self._process: asyncio.subprocess.Process | None = None
        self.client: SglangClient | None = None

    @property
    def pid(self) -> int:
        """Process id of the main one; also that of its group."""
        return self._started().pid

    async def start(self) -> SglangClient:
        """Start it and wait until it answers; StartupError says what it wrote last."""
        try:
            client = await self._spawn()
        except OSError as error:
            raise StartupError(f"SGLang cannot be started: {error}; see to that") from error
        try:
            async with asyncio.timeout(READY_S):
                await self._wait_ready(client)
        except TimeoutError:
            raise StartupError(
                f"SGLang is not ready after {READY_S:g} s; {self.last_words()}"
            ) from None
        return client

    async def wait(self) -> int:
        """Its exit code once it has ended, all of it; negative for a signal."""
        code = await self._started().wait()
        self._kill_group()  # what it may have left
        return code

    async def end(self) -> None:
        """End all of it now. It has nothing to save. Idempotent."""
        if self.client is not None:
            await self.client.close()
        if self._process is not None:
            self._kill_group()
            await self._process.wait()
        if self._folder:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def last_words(self) -> str:
        """Where its log is, and the last lines of it."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TOLD_BYTES))
            text = log.read().decode(errors="replace").replace(self._key, "***")
        told = (line[:_TOLD_WIDTH] for line in text.splitlines()[-_TOLD_LINES:])
        return f"the end of its log {self._log}:\n" + "\n".join(told)

    async def _spawn(self) -> SglangClient:
        # A short path: addresses of sockets have about a hundred characters.
        self._folder = tempfile.mkdtemp(prefix="tinsmith-sglang-")
        port = free_port()
        with self._opened_log() as log:
            self._process = await asyncio.create_subprocess_exec(
                *launching.command(self._options, port),
                env=launching.environment(self._options, self._key, Path(self._folder)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lifeline.tied_to(os.getpid()),
            )
        url, folder = f"http://127.0.0.1:{port}", Path(self._folder)
        self.client = SglangClient(url, key=self._key, folder=folder)
        return self.client

    async def _wait_ready(self, client: SglangClient) -> None:
        ended = asyncio.create_task(self._started().wait(), name="sglang process")
        try:
            while not await client.health():
                await asyncio.wait({ended}, timeout=_POLL_S)
                if ended.done():
                    raise StartupError(
                        f"SGLang ended with code {ended.result()} before it was ready; "
                        f"{self.last_words()}"
                    )
        finally:
            ended.cancel()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _opened_log(self) -> Iterator[int]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if self._log.stat().st_size > LOG_BYTES:
                self._log.replace(self._log.with_suffix(".old.log"))
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            msg = "the server was not started"
            raise RuntimeError(msg)
        return self._process


def free_port() -> int:
    """One that is free now. Whoever takes it first makes a start fail, and the next has another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

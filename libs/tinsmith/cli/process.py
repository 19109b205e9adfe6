"""One supervised process, a service or the broker: how it starts, gets ready and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING, Protocol

from tinsmith import lifeline, logs
from tinsmith.cli.output import lines
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinsmith.broker import Broker

Ready = dict[str, object]
"""What a process said when it became ready."""


class Process(Protocol):
    """What the supervisor needs of a process."""

    label: str
    """Its name in the log."""
    rank: int
    """Ranks are stopped in rising order."""

    @property
    def pid(self) -> int:
        """Process id of the latest start."""

    def spawn(self) -> int:
        """Start it; returns a descriptor to read its output from. May raise StartupError."""

    async def wait_ready(self) -> Ready | None:
        """What it says when it is ready, or None when it ends instead."""

    def shown(self, line: str) -> str | None:
        """A line of its output as the operator sees it; None hides it."""

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""

    def poll(self) -> int | None:
        """Its exit code once it has ended; negative for a signal."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it, and whatever it has started; harmless when it has ended."""

    def refusal(self, code: int) -> StartupError | None:
        """Why its first start must not be tried again, if so."""


class ServiceProcess:
    """A child that speaks the protocol of ``tinsmith.lifeline``."""

    def __init__(
        self,
        label: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        rank: int,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        """``pass_fds`` stay open in it, besides what the protocol needs."""
        self.label = label
        self.rank = rank
        self._pass_fds = pass_fds
        self._argv = argv
        self._env = env
        self._error_line = ""
        self._ready_fd = -1
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the latest start; also the id of its process group."""
        return self._started().pid

    def spawn(self) -> int:
        """Start it in a session of its own: Ctrl-C reaches only the supervisor."""
        self._error_line = ""
        output, output_end = os.pipe()
        self._ready_fd, ready_end = os.pipe()
        parent = os.getpid()
        try:
            self._popen = subprocess.Popen(
                self._argv,
                env={
                    **self._env,
                    lifeline.READY_VARIABLE: str(ready_end),
                    lifeline.PARENT_VARIABLE: str(parent),
                },
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                pass_fds=(ready_end, *self._pass_fds),
                start_new_session=True,
                preexec_fn=lifeline.tied_to(parent),  # noqa: PLW1509 - two C calls
            )
        finally:
            os.close(output_end)
            os.close(ready_end)
        return output

    async def wait_ready(self) -> Ready | None:
        """Reads its readiness message; the pipe ends with the process."""
        async for line in lines(self._ready_fd):
            ready: Ready = json.loads(line)["ready"]
            return ready
        return None

    def shown(self, line: str) -> str | None:
        """All of it; its last error line is remembered."""
        if re.match(rf"{logs.ERROR_PREFIX} [a-z]+: error: ", line):
            self._error_line = line.partition(": error: ")[2]
        return line

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._popen is not None and self._popen.poll() is None

    def poll(self) -> int | None:
        """Its exit code once it has ended; negative for a signal."""
        return self._started().poll()

    def terminate(self) -> None:
        """SIGTERM to the service alone: it ends its own children."""
        self._started().terminate()

    def kill(self) -> None:
        """SIGKILL to its process group."""
        if self._popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def refusal(self, code: int) -> StartupError | None:
        """A start-up error is the same at the next try; a crash may not be."""
        if code != lifeline.EXIT_STARTUP:
            return None
        reason = self._error_line or "it could not start; its output is above"
        return StartupError(f"{self.label}: {reason}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            msg = f"{self.label} was not started"
            raise RuntimeError(msg)
        return self._popen


class BrokerProcess:
    """The nats-server under supervision."""

    label = "broker"

    def __init__(self, broker: Broker, *, rank: int, is_verbose: bool) -> None:
        """``is_verbose`` shows its informational lines too."""
        self.rank = rank
        self._broker = broker
        self._is_verbose = is_verbose
        self._error: StartupError | None = None

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        return self._broker.pid

    def spawn(self) -> int:
        """Start it; StartupError names a missing or old binary, or a taken port."""
        output, output_end = os.pipe()
        try:
            self._broker.spawn(output_end)
        finally:
            os.close(output_end)
        return output

    async def wait_ready(self) -> Ready | None:
        """Waits until JetStream answers."""
        try:
            await asyncio.to_thread(self._broker.wait_ready)
        except StartupError as error:
            self._error = error
            return None
        return {"url": self._broker.url}

    def shown(self, line: str) -> str | None:
        """Warnings and worse, without the columns that the log has already."""
        match = re.fullmatch(r"\[\d+\] \S+ (\d\d:\d\d:\d\d)\S* \[(\w+)\] (.*)", line)
        if match is None:
            return line
        return None if match[2] == "INF" and not self._is_verbose else " ".join(match.groups())

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._broker.is_running

    def poll(self) -> int | None:
        """Its exit code once it has ended; negative for a signal."""
        return self._broker.poll()

    def terminate(self) -> None:
        """SIGTERM: JetStream writes its state."""
        self._broker.terminate()

    def kill(self) -> None:
        """SIGKILL; its store is safe, every acknowledged write is on the disk."""
        self._broker.kill()

    def refusal(self, code: int) -> StartupError | None:
        """A broker that does not start at first will not at second."""
        return self._error or StartupError(f"nats-server ended with code {code}; see its log above")

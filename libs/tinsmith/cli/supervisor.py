"""Keeping processes running: bring them up, restart what crashes, stop in order."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.cli.output import lines
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tinsmith.cli.output import LogStream
    from tinsmith.cli.process import Process, Ready

MAX_FAILED_STARTS = 5  # of a process that has never been ready
POLL_S = 0.1
DRAIN_S = 1.0  # for the last lines of a process that has ended
OWN_LABEL = "up"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How patient the supervisor is; all in seconds."""

    first_pause_s: float = 0.5
    """Before the first restart; doubles from crash to crash."""
    longest_pause_s: float = 10.0
    stable_s: float = 30.0
    """A process that has run for so long is restarted after the first pause again."""
    notice_s: float = 5.0
    """How often a wait is mentioned."""
    stop_s: tuple[float, ...] = (5.0, 12.0, 19.0)
    """Deadline of each rank, counted from the beginning of the stop."""
    hurried_stop_s: tuple[float, ...] = (0.5, 1.0, 3.0)
    """The same after a failed start, when nothing is worth waiting for."""


class Supervisor:
    """Made by ``supervise``; used by one task."""

    def __init__(
        self, log: LogStream, group: asyncio.TaskGroup, timing: Timing, label: str
    ) -> None:
        self.stopping = asyncio.Event()
        """Set to end everything; also set when a process cannot be started."""
        self.ready: dict[str, Ready] = {}
        """Label -> what the process said; absent while it is not ready."""
        self.failure: StartupError | None = None
        self.on_ready: Callable[[], None] | None = None
        """Called when all processes are ready: at first, and again after a restart."""
        self._log = log
        self._group = group
        self._timing = timing
        self._label = label
        self._processes: list[Process] = []
        self._changed = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        """Label -> process id."""
        return {process.label: process.pid for process in self._processes}

    async def bring_up(self, processes: Sequence[Process]) -> bool:
        """Start these too and wait until all are ready; False when the stop came first."""
        loop = asyncio.get_running_loop()
        for process in processes:
            self._processes.append(process)
            self._group.create_task(self._keep(process), name=f"keep {process.label}")
        began = loop.time()
        while not self.stopping.is_set():
            missing = [p.label for p in processes if p.label not in self.ready]
            if not missing:
                return True
            if not await self._any_change(self._timing.notice_s):
                waited = loop.time() - began
                self._log.write(self._label, f"waiting for {', '.join(missing)} ({waited:.0f} s)")
        return False

    def request_stop(self) -> None:
        """First call: stop in order. Second call: kill."""
        if self.stopping.is_set():
            self.kill_all()
            return
        self._log.write(self._label, "stopping")
        self.stopping.set()
        self._changed.set()

    async def stop_in_order(self) -> None:
        """Ask rank after rank to end; what is still there at its rank's deadline is killed."""
        self.stopping.set()
        began = asyncio.get_running_loop().time()
        deadlines = self._timing.hurried_stop_s if self.failure else self._timing.stop_s
        by_rank = sorted(self._processes, key=lambda process: process.rank)
        for rank, members in itertools.groupby(by_rank, key=lambda process: process.rank):
            await self._stop_rank(list(members), until=began + deadlines[rank])

    def kill_all(self) -> None:
        """SIGKILL to everything that has not ended."""
        for process in self._processes:
            if process.is_running:
                process.kill()

    async def _stop_rank(self, members: list[Process], *, until: float) -> None:
        loop = asyncio.get_running_loop()
        running = [process for process in members if process.is_running]
        for process in running:
            process.terminate()
        await _ended(running, timeout_s=until - loop.time())
        for process in [p for p in running if p.is_running]:
            self._log.write(self._label, f"{process.label} did not stop in time; killing it")
            process.kill()

    async def _keep(self, process: Process) -> None:
        life = _Life(self._timing)
        loop = asyncio.get_running_loop()
        while not self.stopping.is_set():
            began = loop.time()
            try:
                code = await self._run_once(process, life)
            except StartupError as error:
                self._fail(error)
                return
            if self.stopping.is_set():
                return
            failure = _why_give_up(process, code, life)
            if failure is not None:
                self._fail(failure)
                return
            pause = life.next_pause(loop.time() - began)
            how = f"signal {-code}" if code < 0 else f"code {code}"
            self._log.write(self._label, f"{process.label} ended ({how}); restart in {pause:g} s")
            await self._stopped_within(pause)

    async def _run_once(self, process: Process, life: _Life) -> int:
        life.starts += 1
        output = process.spawn()
        async with asyncio.TaskGroup() as group:
            readers = [
                group.create_task(self._pump(process, output), name=f"log {process.label}"),
                group.create_task(self._note_ready(process, life), name=f"ready {process.label}"),
            ]
            await _ended([process])
            process.kill()  # what it leaves behind may hold a device, and its pipes
            await asyncio.wait(readers, timeout=DRAIN_S)
            for reader in readers:
                reader.cancel()
        self.ready.pop(process.label, None)
        return process.poll() or 0

    async def _pump(self, process: Process, output: int) -> None:
        async for line in lines(output):
            shown = process.shown(line)
            if shown is not None:
                self._log.write(process.label, shown)

    async def _note_ready(self, process: Process, life: _Life) -> None:
        ready = await process.wait_ready()
        if ready is None:
            return
        life.was_ready = True
        self.ready[process.label] = ready
        self._changed.set()
        if self.on_ready is not None and len(self.ready) == len(self._processes):
            try:
                self.on_ready()
            except StartupError as error:
                self._fail(error)

    def _fail(self, error: StartupError) -> None:
        self.failure = self.failure or error
        self.stopping.set()
        self._changed.set()

    async def _any_change(self, patience_s: float) -> bool:
        self._changed.clear()
        return await _happens(self._changed, patience_s)

    async def _stopped_within(self, seconds: float) -> bool:
        return await _happens(self.stopping, seconds)


@dataclass
class _Life:
    """What became of the starts of one process so far."""

    timing: Timing
    starts: int = 0
    crashes_in_a_row: int = 0
    was_ready: bool = False

    def next_pause(self, lived_s: float) -> float:
        """Doubles from one crash to the next, unless the process has been stable between."""
        self.crashes_in_a_row = 0 if lived_s > self.timing.stable_s else self.crashes_in_a_row + 1
        doublings = min(max(0, self.crashes_in_a_row - 1), 16)
        return min(self.timing.first_pause_s * (1 << doublings), self.timing.longest_pause_s)


def _why_give_up(process: Process, code: int, life: _Life) -> StartupError | None:
    if life.was_ready:
        return None
    refusal = process.refusal(code)
    if refusal is not None or life.starts < MAX_FAILED_STARTS:
        return refusal
    return StartupError(
        f"{process.label} ended {life.starts} times before it was ready; its output is above"
    )


async def _ended(processes: Sequence[Process], timeout_s: float | None = None) -> None:
    """Polls: a child's end is no event on every platform, and 0.1 s are soon enough."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while any(process.is_running for process in processes):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)


async def _happens(event: asyncio.Event, patience_s: float) -> bool:
    try:
        async with asyncio.timeout(patience_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def supervise(
    log: LogStream, timing: Timing | None = None, *, label: str = OWN_LABEL
) -> AsyncIterator[Supervisor]:
    """A supervisor that stops everything in order when the block ends; ``label`` is its own.

    Raises:
        StartupError: why a process could not be started, after all have been stopped.
    """
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(log, group, timing or Timing(), label)
        try:
            yield supervisor
        except StartupError as error:
            supervisor.failure = error
        finally:
            try:
                await supervisor.stop_in_order()
            finally:
                supervisor.kill_all()
    if supervisor.failure is not None:
        raise supervisor.failure

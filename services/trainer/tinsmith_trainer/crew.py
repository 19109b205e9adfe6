"""The other ranks of a trainer: processes that the first rank starts, and that end with it.

Where torchrun has started the ranks it ends them too, and there is nobody to start here.

A rank that ends before it was told to ends the trainer at once, whatever that is doing: nothing can
be computed without it, and the broker's log has all that is needed to go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from tinsmith import lifeline, logs
from tinsmith.config import LogsConfig, ModelConfig
from tinsmith.errors import StartupError
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.seat import Seat

if TYPE_CHECKING:
    from types import TracebackType

    from tinsmith_trainer.engine import TrainingEngine

PATIENCE_S = 10.0  # for ranks that were told to stop


class Orders(msgspec.Struct, frozen=True):
    """What a rank is told when it starts, on its standard input."""

    seat: Seat
    model: ModelConfig
    trainer: TrainerConfig
    logs: LogsConfig


class Crew:
    """All ranks but the first. Made on the main thread, with which they end too."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, logging: LogsConfig) -> None:
        """Starts them; they load the model and wait for the first rank."""
        self._folder = tempfile.TemporaryDirectory(prefix="tinsmith-ranks-")
        meeting = str(Path(self._folder.name) / "meeting")
        self.seat = _seat(0, trainer.ranks, meeting)
        """Of the first rank."""
        self._is_ready = self._is_over = False
        self._ranks = [
            _started(Orders(_seat(rank, trainer.ranks, meeting), model, trainer, logging))
            for rank in range(1, trainer.ranks)
        ]
        for rank, process in enumerate(self._ranks, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def ready(self) -> None:
        """All have met."""
        self._is_ready = True

    def dismiss(self, engine: TrainingEngine) -> None:
        """Tell them to stop, and wait until they have."""
        self._is_over = True
        engine.close()
        for process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """They are gone afterwards."""
        self._is_over = True
        for process in self._ranks:
            process.kill()  # nothing, if it has ended
            process.wait()
        self._folder.cleanup()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_over:
            return
        log = structlog.get_logger("tinsmith.crew")
        log.error("a rank has ended; so does the trainer", rank=rank, code=code)
        sys.stderr.flush()
        is_startup = code == lifeline.EXIT_STARTUP and not self._is_ready
        os._exit(lifeline.EXIT_STARTUP if is_startup else lifeline.EXIT_FAILED)


def _seat(rank: int, ranks: int, meeting: str) -> Seat:
    """On the one machine of all."""
    return Seat(rank, ranks, meeting, place=rank, beside=ranks)


def _started(orders: Orders) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tinsmith_trainer.crew"],
        env={**os.environ, lifeline.PARENT_VARIABLE: str(parent)},
        stdin=subprocess.PIPE,
        preexec_fn=lifeline.tied_to(parent),  # noqa: PLW1509 - two C calls
    )
    if process.stdin is not None:
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(orders))
    return process


class Others:
    """The other ranks where torchrun has started all: a crew that is somebody else's care."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        """Of the first rank."""

    def ready(self) -> None:
        """All have met."""

    def dismiss(self, engine: TrainingEngine) -> None:
        """Tell them to stop."""
        engine.close()

    def __enter__(self) -> Others:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever started them ends them all when one of them has failed."""


def main() -> int:
    """One rank that a crew has started; its exit code."""
    return follow(msgspec.json.decode(sys.stdin.buffer.read(), type=Orders))


def follow(orders: Orders) -> int:
    """One rank, not the first, from its start to its end; its exit code."""
    seat = orders.seat
    if seat.meeting:  # torchrun, while it starts ranks, ends them by signals
        _leave_signals_to_the_first()
    lifeline.tie_to_parent()
    logs.configure(orders.logs, service="trainer", instance=f"rank-{seat.rank}")
    from tinsmith_trainer.following import Follower
    from tinsmith_trainer.loading import load
    from tinsmith_trainer.ranked_engine import RankedEngine

    try:
        engine, _ = load(orders.model, orders.trainer, seat)
    except StartupError as error:
        logs.report("trainer", error)
        return lifeline.EXIT_STARTUP
    _leave_signals_to_the_first()
    if isinstance(engine, RankedEngine):
        Follower(engine).run()
    return lifeline.EXIT_OK


def _leave_signals_to_the_first() -> None:
    """It decides when to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())

"""What every replay prints: how far it is, its doubts, its outcome; and what it exits with."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tinsmith.logbook.text import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import ProgressColumn

EXIT_EQUAL = 0
EXIT_DIVERGED = 1


def conclude(told: str, *, is_equal: bool) -> int:
    """Print the outcome; the exit code that says the same."""
    sys.stdout.write(told + "\n")
    return EXIT_EQUAL if is_equal else EXIT_DIVERGED


def warn(doubt: str) -> None:
    """Say what may make a difference that is nobody's fault."""
    sys.stderr.write(f"tinsmith replay: warning: {plain(doubt)}\n")


@contextmanager
def progress(
    doing: str, things: str, total: int | None, *more: ProgressColumn
) -> Iterator[Callable[[], None]]:
    """A bar on standard error, if that is a terminal; call what it gives after every thing.

    ``total`` is the number of things, None when there is no end to them; ``more`` columns come
    before the time that is left.
    """
    columns = (
        TextColumn(doing),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(f"{things},"),
        *more,
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)

"""How the demo shows what it is doing, and how long that took."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from tinsmith.demo.loop import Step


@contextlib.contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """A spinner and a clock while it lasts, and one line with its duration when it is done."""
    began = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        progress.add_task(text, total=None)
        yield
    lasted = f"{time.monotonic() - began:.0f} s"
    console.print(f"{text}: {lasted}", markup=False, highlight=False, soft_wrap=True)


def training_bar(console: Console, steps: Iterable[Step], total: int) -> Iterator[Step]:
    """The steps as they come, and a bar that shows the last one."""
    columns = (
        TextColumn("Training"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(
            "steps, loss {task.fields[loss]:.2f} per token, {task.fields[rate]:.0f} tokens/s,"
        ),
        TimeElapsedColumn(),
    )
    tokens = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total, loss=float("nan"), rate=0.0)
        for done in steps:
            tokens += done.tokens
            progress.update(
                task, completed=done.number, loss=done.loss_per_token, rate=tokens / done.ended_s
            )
            yield done

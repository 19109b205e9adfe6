"""How the demo shows what it is doing, and how long that took."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from tinsmith.demo.loop import Step


@contextlib.contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """A spinner while it lasts, and one line with its duration when it is done."""
    began = time.monotonic()
    with console.status(text):
        yield
    console.print(f"{text}: {time.monotonic() - began:.0f} s", highlight=False, soft_wrap=True)


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

"""Tables for terminals of any width: what does not fit is left out by rank, never cut off.

Names come from clients and from other machines: they are shown as they are, without markup and
without what could steer a terminal.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinsmith.logbook.text import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

ALWAYS = 0
WIDE = 76
"""Columns of a terminal from which there is room for more than the essential."""
WIDER = 110
GOOD, BAD, FAINT = "green", "bold red", "dim"


class Column(NamedTuple):
    """One column; shown from ``width`` columns of the terminal on."""

    head: str
    width: int = ALWAYS
    is_number: bool = False


def console() -> Console:
    """Standard output: colours on a terminal alone, and no guesses about what is meant."""
    return Console(highlight=False, markup=False, emoji=False)


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], width: int) -> Table:
    """One line per row, or more where a cell is folded."""
    shown = [n for n, column in enumerate(columns) if width >= column.width]
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for n in shown:
        made.add_column(
            columns[n].head,
            justify="right" if columns[n].is_number else "left",
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(cell(row[n]) for n in shown))
    return made


def cell(value: object) -> Text:
    """Text is shown with its style, all else as plain text; None is a dash."""
    if isinstance(value, Text):
        return value
    return Text("-" if value is None else plain(value))


def styled(value: object, style: str) -> Text:
    """As ``cell``, in a colour."""
    return Text(plain(value), style=style)


def title(text: str) -> Text:
    """Above a table."""
    return Text(f"\n{text}", style="bold cyan")


def say(out: Console, *parts: RenderableType) -> None:
    """Print one below the other."""
    for part in parts:
        out.print(part)


def age(seconds: float) -> str:
    """For how long, in the unit that fits."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def since(at_s: float | None, now_s: float | None = None) -> str:
    """How long ago; a dash for never."""
    if at_s is None:
        return "-"
    return age((time.time() if now_s is None else now_s) - at_s)


def short_ids(ids: Iterable[str], least: int = 8) -> dict[str, str]:
    """Each id -> as much of its beginning as no other has: what commands take for it."""
    ordered = sorted(set(ids))
    common = [0, *map(_common, ordered, ordered[1:]), 0]
    return {
        one: one[: max(least, common[n] + 1, common[n + 1] + 1)] for n, one in enumerate(ordered)
    }


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def last_name(model: str) -> str:
    """A model's name without its organisation."""
    return model.rpartition("/")[2]

"""Holds the size budget: small files, small functions. Prints what is over it; exit code 1."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("libs", "services")
GENERATED = "proto"


class Budget(NamedTuple):
    """Lines, or a share."""

    median: float
    p90: float
    limit: float


FILES = Budget(median=120, p90=250, limit=400)
FUNCTIONS = Budget(median=8, p90=25, limit=80)
LONG_FUNCTION = 50
LONG_SHARE = 0.015


class Sized(NamedTuple):
    """Something with a length."""

    lines: int
    where: str


def measure() -> tuple[list[Sized], list[Sized]]:
    """Every file and every function of the sources."""
    files, functions = [], []
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if GENERATED in path.parts or not path.read_text().strip():
                continue
            text, name = path.read_text(), str(path.relative_to(ROOT))
            files.append(Sized(text.count("\n"), name))
            functions += [
                Sized((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}:{node.lineno}")
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
    return files, functions


def over(kind: str, sizes: list[Sized], budget: Budget) -> list[str]:
    """What ``sizes`` has over ``budget``, in words."""
    lines = [size.lines for size in sizes]
    median, p90 = statistics.median(lines), statistics.quantiles(lines, n=10)[-1]
    sys.stdout.write(
        f"{kind}: {len(lines)}, median {median:g} (budget {budget.median:g}), "
        f"p90 {p90:.0f} ({budget.p90:g}), longest {max(lines)} ({budget.limit:g})\n"
    )
    complaints = []
    if median > budget.median or p90 > budget.p90:
        complaints.append(f"{kind}: median {median:g} or p90 {p90:.0f} is over the budget")
    complaints += [
        f"{size.where}: {size.lines} lines, over {budget.limit:g}"
        for size in sizes
        if size.lines > budget.limit
    ]
    return complaints


def main() -> int:
    """Check everything."""
    files, functions = measure()
    complaints = over("files", files, FILES) + over("functions", functions, FUNCTIONS)
    long = [size for size in functions if size.lines > LONG_FUNCTION]
    if len(long) > LONG_SHARE * len(functions):
        names = ", ".join(size.where for size in long)
        complaints.append(f"{len(long)} functions over {LONG_FUNCTION} lines: {names}")
    for complaint in complaints:
        sys.stdout.write(complaint + "\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

"""``tinsmith bench``: lists and runs the measurements that lie in the source tree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

TREE = Path(__file__).parents[3]
FOLDER = "tests/bench"
FAILED = 2
_TARGET = re.compile(r"-m tests\.bench\.(\w+)")
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""As ``make`` sets them: threads that spin would starve the services beside them."""


def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", show_default=False)] = None,
) -> None:
    """List measurements of this machine, or make one.

    Each prints its figures as JSON. They need the source tree and its environment ('make test'
    builds it), and take minutes.

    \b
    Exit codes:
      0  done
      2  there is no such bench, or no source tree
      else, as the bench ended

    \b
    Examples:
      tinsmith bench
      tinsmith bench step
    """
    found = benches(TREE)
    if not found:
        _refuse(
            f"{FOLDER} is not here, as this is an installed package; get the source tree, and "
            "there 'make bench'"
        )
    if name is None:
        width = max(map(len, found))
        for one, title in found.items():
            typer.echo(f"{one:<{width}}  {title}")
        return
    if name not in found:
        _refuse(f"NAME: there is no bench {name[:80]!r}; one of {', '.join(found)}")
    command = [sys.executable, "-m", f"{FOLDER.replace('/', '.')}.{name}"]
    done = subprocess.run(command, cwd=TREE, env={**SETTINGS, **os.environ}, check=False)
    sys.exit(done.returncode)


def benches(tree: Path) -> dict[str, str]:
    """Name -> first line of its docstring, of those that ``make`` has a target for."""
    makefile = tree / "Makefile"
    if not makefile.is_file():
        return {}
    found = {}
    for name in _TARGET.findall(makefile.read_text()):
        title = ast.get_docstring(ast.parse((tree / FOLDER / f"{name}.py").read_text())) or ""
        found[name] = title.partition("\n")[0].rstrip(";")
    return found


def _refuse(why: str) -> None:
    typer.echo(f"tinsmith bench: error: {why}", err=True)
    raise typer.Exit(FAILED)

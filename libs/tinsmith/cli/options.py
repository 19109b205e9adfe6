"""Options that more than one command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="TOML file [default: $TINSMITH_CONFIG]."),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", "-d", metavar="DIR", help="Folder of everything that is kept."),
]

"""``tinsmith doctor``: its options and its help."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - typer reads annotations


def doctor(
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,  # noqa: FBT002
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Check this machine, and say what to do about it.

    Configuration, Python, packages, cores, memory, GPU, disk, blob store, master key, ports,
    broker, model files. No model is loaded, no check may take longer than 40 seconds, and nothing
    is changed but for a few bytes that are put into the blob store, to see whether it takes them.

    \b
    Exit codes:
      0  nothing is wrong; what is marked 'warn' works, and could be better
      1  something will not work: each line says what to do
      2  usage

    \b
    Examples:
      tinsmith doctor
      tinsmith doctor --config split.toml
      tinsmith doctor --json | jq '.[] | select(.level != "ok")'
    """
    from tinsmith.cli import doctor_command as command

    sys.exit(command.run(config, data_dir, is_json=is_json))

"""``tinsmith models``: its options and its help."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - typer reads annotations

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tinsmith.config import Config


def models(
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,  # noqa: FBT002
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """List base models, configured and served ones.

    Of each: its files, how its weights are held, context, vocabulary, and who trains and samples.

    \b
    Exit codes:
      0  the files of each configured model are in place, and somebody trains and samples it
      1  files are absent or damaged, somebody is missing, or no broker answers
      2  it could not be looked at: usage, configuration

    \b
    Examples:
      tinsmith models
      tinsmith models --json | jq '.[] | {name, files, samplers}'
    """
    from tinsmith.cli import looking
    from tinsmith.cli import models_command as command

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return command.models(loaded, is_json=is_json)

    sys.exit(looking.run("models", config, data_dir, main))

"""``tinsmith status``: its options and its help."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - typer reads annotations

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tinsmith.config import Config


def status(
    is_watching: Annotated[  # noqa: FBT002
        bool, typer.Option("--watch", "-w", help="Show it anew every two seconds, until Ctrl-C.")
    ] = False,
    is_json: Annotated[  # noqa: FBT002
        bool, typer.Option("--json", help="Print one JSON object, or with --watch one a line.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Show who works, what waits, and what is wrong.

    Services, runs, queues, weights, and the broker with its streams. It listens for two and a half
    seconds. The installation is the broker of --config or TINSMITH_NATS_URL, or else the
    'tinsmith up' that runs in --data-dir.

    \b
    Exit codes:
      0  all is well; --watch: ended by Ctrl-C
      1  something is missing, in trouble or nearly full: it is said first, with a remedy
      2  it could not be looked at: usage, configuration, no broker

    \b
    Examples:
      tinsmith status
      tinsmith status --watch
      tinsmith status --json | jq '.problems[].what'
    """
    from tinsmith.cli import looking
    from tinsmith.cli import status_command as command

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return command.status(loaded, is_watching=is_watching, is_json=is_json)

    sys.exit(looking.run("status", config, data_dir, main))

"""The commands of ``tinsmith runs``, their options and their help."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - typer reads annotations

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tinsmith.config import Config

EXIT_CODES = """\b
Exit codes:
  0  done
  2  it could not be done: usage, configuration, broker, no such run"""

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
IsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(epilog=EXIT_CODES)
def runs(
    context: typer.Context,
    is_all: Annotated[  # noqa: FBT002
        bool, typer.Option("--all", "-a", help="Also those that are over.")
    ] = False,
    is_json: IsJson = False,  # noqa: FBT002
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """List runs, or show one: who trains what.

    Newest first: owner, base model, rank, last op and when, state, checkpoints.

    'tinsmith log ls' lists logs, those of imported runs too. The installation is the broker of
    --config or TINSMITH_NATS_URL, or else the 'tinsmith up' that runs in --data-dir.

    \b
    Examples:
      tinsmith runs
      tinsmith runs --all --json | jq '.[].model_id'
      tinsmith runs show abcd
    """
    if context.invoked_subcommand is not None:
        return
    from tinsmith.cli import looking
    from tinsmith.cli import runs_command as command

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return command.list_runs(loaded, is_all=is_all, is_json=is_json)

    sys.exit(looking.run("runs", config, data_dir, main))


@app.command(epilog=EXIT_CODES)
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    is_json: IsJson = False,  # noqa: FBT002
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Show all that is known of one run, and its checkpoints.

    RUN is its id, or as much of its beginning as no other has.

    \b
    Examples:
      tinsmith runs show abcd
      tinsmith runs show abcd --json | jq '.checkpoints[].path'
    """
    from tinsmith.cli import looking
    from tinsmith.cli import runs_command as command

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return command.show_run(loaded, run, is_json=is_json)

    sys.exit(looking.run("runs show", config, data_dir, main))

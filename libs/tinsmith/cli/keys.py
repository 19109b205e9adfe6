"""The commands of ``tinsmith keys``, their options and their help."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - typer reads annotations

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tinsmith.config import Config

MaxUnfinished = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Most requests of its owner that are not done [default: gateway.max_unfinished].",
    ),
]
SamplingShare = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Most samples of its owner that are drawn at a time [default: "
        "gateway.sampling_share].",
    ),
]
EXIT_CODES = """\b
Exit codes:
  0  done
  2  it could not be done: usage, configuration, broker, no such key"""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make, list, limit and revoke API keys.\n\n"
    "Every gateway knows within a second. The installation is the broker of --config or "
    "TINSMITH_NATS_URL, or else the 'tinsmith up' that runs in --data-dir. Keys from the "
    "configuration are valid besides, and not listed.",
    epilog=EXIT_CODES,
)


@app.command(epilog=EXIT_CODES)
def create(
    owner: Annotated[str, typer.Argument(metavar="OWNER", show_default=False)],
    project: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Project of the sessions that name none themselves."),
    ] = None,
    expires_days: Annotated[
        float | None,
        typer.Option(
            min=0, max=36500, metavar="DAYS", help="Valid for so long [default: until revoked]."
        ),
    ] = None,
    max_unfinished: MaxUnfinished = None,
    sampling_share: SamplingShare = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Make a key and print it, once: only its digest is kept.

    All keys of one owner reach the same runs, so that a key can be replaced by another.

    \b
    Examples:
      tinsmith keys create alice
      export TINKER_API_KEY=$(tinsmith keys create alice --expires-days 30)
    """
    from tinsmith.cli import key_commands as commands

    def main(loaded: Config) -> Coroutine[Any, Any, None]:
        terms = commands.Terms(project, expires_days, max_unfinished, sampling_share)
        return commands.create(loaded, owner, terms)

    sys.exit(commands.run("create", config, data_dir, main))


@app.command("list", epilog=EXIT_CODES)
def list_(config: ConfigFile = None, data_dir: DataDir = None) -> None:
    """List keys, the ended ones too.

    Of each its id, owner, project, when it was made, last characters and state.

    \b
    Example:
      tinsmith keys list
    """
    from tinsmith.cli import key_commands as commands

    sys.exit(commands.run("list", config, data_dir, commands.show))


@app.command(epilog=EXIT_CODES)
def limit(
    key: Annotated[str, typer.Argument(metavar="ID|KEY", show_default=False)],
    max_unfinished: MaxUnfinished = None,
    sampling_share: SamplingShare = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Set the limits of a key, at once and everywhere.

    The key is named by its id in the list, or by itself. What is not given is the configuration's
    again. Of several keys of an owner the largest counts.

    \b
    Example:
      tinsmith keys limit 5f1c02ab9d3e --max-unfinished 5000 --sampling-share 200
    """
    from tinsmith.cli import key_commands as commands

    def main(loaded: Config) -> Coroutine[Any, Any, None]:
        terms = commands.Terms(None, None, max_unfinished, sampling_share)
        return commands.limit(loaded, key, terms)

    sys.exit(commands.run("limit", config, data_dir, main))


@app.command(epilog=EXIT_CODES)
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID|KEY", show_default=False)],
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """End a key for good, by its id in the list or by the key itself. Its owner's runs stay.

    \b
    Example:
      tinsmith keys revoke 5f1c02ab9d3e
    """
    from tinsmith.cli import key_commands as commands

    def main(loaded: Config) -> Coroutine[Any, Any, None]:
        return commands.revoke(loaded, key)

    sys.exit(commands.run("revoke", config, data_dir, main))

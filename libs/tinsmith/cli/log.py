"""The commands of ``tinsmith log``, their options and their help."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - typer reads annotations

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tinsmith.config import Config

EXIT_CODES = """\b
Exit codes:
  0  done; verify: all is as it must be; diff: no difference
  1  a log does not verify, or two runs differ; the first place is named
  2  it could not be done: usage, configuration, broker, no such run or file, disk"""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Read, verify and carry the logs of runs.\n\n"
    "RUN is the id of a run, or as much of its beginning as no other has. FILE is an exported "
    "log. The installation is the broker of --config or TINSMITH_NATS_URL, or else the "
    "'tinsmith up' that runs in --data-dir.",
    epilog=EXIT_CODES,
)

RunOrFile = Annotated[str, typer.Argument(metavar="RUN|FILE", show_default=False)]


@app.command(epilog=EXIT_CODES)
def ls(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Of a file, not of the installation.")
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """List runs, imported ones too, and what is left of pruned ones.

    Of each its base model, last op, number of owners and the digest of the last entry.

    \b
    Examples:
      tinsmith log ls
      tinsmith log ls run.tslog
    """
    from tinsmith.cli import log_commands as commands

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return commands.ls(loaded, file)

    sys.exit(commands.run("ls", config, data_dir, main))


@app.command(epilog=EXIT_CODES)
def show(
    run: RunOrFile,
    first: Annotated[int, typer.Option("--from", min=0, metavar="N", help="First op.")] = 0,
    last: Annotated[
        int | None,
        typer.Option("--to", min=0, metavar="N", help="Last op.", show_default=False),
    ] = None,
    is_json: Annotated[  # noqa: FBT002
        bool, typer.Option("--json", help="One JSON object per line, digests in full.")
    ] = False,
    is_of_samples: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--samples",
            help="What was sampled from the run's weights; or, given the whole id of a session, "
            "from the base model in it.",
        ),
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Print one line per entry of a run's log. Checks digests of ops and results only.

    \b
    Examples:
      tinsmith log show abcd
      tinsmith log show abcd --from 100 --to 120
      tinsmith log show run.tslog --json | jq .details.metrics
      tinsmith log show abcd --samples
    """
    from tinsmith.cli import log_commands as commands

    span = commands.Span(first, last)

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        if is_of_samples:
            return commands.show_samples(loaded, run, span, is_json=is_json)
        return commands.show(loaded, run, span, is_json=is_json)

    sys.exit(commands.run("show", config, data_dir, main))


@app.command(epilog=EXIT_CODES)
def verify(
    run: Annotated[str | None, typer.Argument(metavar="RUN|FILE", show_default=False)] = None,
    is_all: Annotated[bool, typer.Option("--all", help="Every run of the installation.")] = False,  # noqa: FBT002
    head: Annotated[
        str,
        typer.Option(
            metavar="DIGEST",
            help="A digest that was kept, or its first 16 digits or more: the log must have that "
            "entry, or its end was cut off.",
            show_default=False,
        ),
    ] = "",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Verify logs, and name the first bad entry.

    Chain, order, digests, blobs and anchors are checked. Of a log that was pruned by policy it is
    told when, and what its last entry was.

    \b
    Examples:
      tinsmith log verify --all
      tinsmith log verify abcd --head 5f1c...
      tinsmith log verify run.tslog
    """
    from tinsmith.cli import log_commands as commands

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return commands.verify(loaded, run, is_all=is_all, head=head)

    sys.exit(commands.run("verify", config, data_dir, main))


@app.command(epilog=EXIT_CODES)
def export(
    run: RunOrFile,
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,  # noqa: FBT002
    samples: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--samples", help="With what was sampled from the run's weights, and these."),
    ] = False,
    is_sealed: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--sealed",
            help="Leave out the key of sealed contents: the file can be verified, and read only "
            "where the key is.",
        ),
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Write a run's log and every blob behind it to one file. Verifies them.

    The file holds the key of what is sealed, so that it can be read, verified and replayed by
    itself, also after 'tinsmith log forget': who has it has the run's data. With --sealed it does
    not.

    \b
    Examples:
      tinsmith log export abcd run.tslog
      tinsmith log export abcd run.tslog --sealed
    """
    from tinsmith.cli import log_commands as commands

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return commands.export(
            loaded, run, file, overwrite=force, has_samples=samples, has_key=not is_sealed
        )

    sys.exit(commands.run("export", config, data_dir, main))


@app.command("import", epilog=EXIT_CODES)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    resume: Annotated[  # noqa: FBT002
        bool, typer.Option("--resume", help="Go on with an import of FILE that broke off.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Append the log in a file to the installation.

    It must have none of that run. For reading, verifying and replaying it there: the run is not
    registered, so that no client can go on with it.

    \b
    Example:
      tinsmith log import run.tslog
    """
    from tinsmith.cli import log_commands as commands

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return commands.import_(loaded, file, resume=resume)

    sys.exit(commands.run("import", config, data_dir, main))


@app.command(epilog=EXIT_CODES)
def forget(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,  # noqa: FBT002
    force: Annotated[  # noqa: FBT002
        bool, typer.Option("--force", help="Also when its session has not ended: it breaks off.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Destroy the key of a run's contents, for good.

    Nobody can read its data any more: what it was trained on and what came out are lost. The log
    still verifies, but is not replayed. Checkpoints, exported files and what was not sealed stay.

    \b
    Example:
      tinsmith log forget abcd
    """
    from tinsmith.cli import log_commands as commands
    from tinsmith.cli import log_forget

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return log_forget.forget(loaded, run, is_sure=yes, is_forced=force)

    sys.exit(commands.run("forget", config, data_dir, main))


@app.command(epilog=EXIT_CODES)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", show_default=False)],
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Find the first op at which two runs differ, and in what. A and B are runs or files.

    Ids of the runs and of their sessions do not count.

    \b
    Examples:
      tinsmith log diff abcd efgh
      tinsmith log diff abcd run.tslog
    """
    from tinsmith.cli import log_commands as commands

    def main(loaded: Config) -> Coroutine[Any, Any, int]:
        return commands.diff(loaded, a, b)

    sys.exit(commands.run("diff", config, data_dir, main))

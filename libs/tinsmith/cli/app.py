"""The commands, their options and their help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator  # noqa: TC003 - typer reads annotations
from contextlib import contextmanager
from pathlib import Path  # noqa: TC003 - as above
from typing import Annotated

import typer

from tinsmith import __version__
from tinsmith.cli import bench as benching
from tinsmith.cli import doctor as examining
from tinsmith.cli import gc as collecting
from tinsmith.cli import keys, log, models_list, portable, runs
from tinsmith.cli import status as looking
from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - as above
from tinsmith.errors import StartupError, TinsmithError

EXIT_CODES = """\b
Exit codes:
  0  ended as asked
  1  failed in a way nobody foresaw; the log has the traceback
  2  cannot start: usage, configuration, missing package, broker or model
  3  the connection to the broker was closed for good"""

app = typer.Typer(
    name="tinsmith",
    help="Tinsmith: an open training server for the Tinker protocol.\n\n"
    "Start everything on this machine with 'tinsmith up'.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(no_args_is_help=True, help="Look at the configuration.")
app.add_typer(config_app, name="config")
app.add_typer(log.app, name="log")
app.add_typer(keys.app, name="keys")
app.add_typer(runs.app, name="runs")

Alone = Annotated[
    bool,
    typer.Option("--alone", help="Leave out the room that other runs had in this one's passes."),
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Which of [[models]] [default: the first]."),
]

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, max=64, metavar="N", help="Processes at one address [default: 1]."
    ),
]


def main() -> None:
    """Entry point of the ``tinsmith`` script."""
    app(prog_name="tinsmith")


@app.command(epilog=EXIT_CODES)
def up(
    config: ConfigFile = None,
    data_dir: DataDir = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the gateway.")] = None,
    nats_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the broker; 0 picks a free one.")
    ] = 0,
    services: Annotated[
        str, typer.Option(metavar="A,B", help="Start only these services.")
    ] = "gateway,trainer,sampler,checkpointer",
    ready_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write addresses and process ids here once all is ready."
        ),
    ] = None,
) -> None:
    """Start everything on this machine.

    Broker and services are started, watched, restarted after a crash, and stopped by Ctrl-C.

    A broker given by TINSMITH_NATS_URL or bus.url is used instead of starting one.

    \b
    Examples:
      tinsmith up
      tinsmith up --config deploy/config/laptop-cpu.toml --port 8400
      tinsmith up --services gateway,checkpointer
    """
    with _one_line_errors("up"):
        from tinsmith.cli import up as command

        options = command.Options(
            config=config,
            data_dir=data_dir,
            port=port,
            nats_port=nats_port or -1,
            services=tuple(filter(None, services.split(","))),
            ready_file=ready_file,
        )
        sys.exit(command.run(options))


def _add_service(name: str, help_text: str) -> None:
    def run(config: Path | None, key: str = "", value: str | int | None = None) -> None:
        overrides = {f"TINSMITH_{name.upper()}__{key}": str(value)} if value else {}
        with _one_line_errors(name):
            from tinsmith.cli import foreground

            sys.exit(foreground.run(name, config, overrides))

    def with_model(config: ConfigFile = None, model: Model = None) -> None:
        run(config, "MODEL", model)

    def with_workers(config: ConfigFile = None, workers: Workers = None) -> None:
        run(config, "WORKERS", workers)

    def plain(config: ConfigFile = None) -> None:
        run(config)

    commands: dict[str, Callable[..., None]] = {
        "gateway": with_workers,
        "trainer": with_model,
        "sampler": with_model,
    }
    app.command(name=name, help=help_text, epilog=EXIT_CODES)(commands.get(name, plain))


_SERVICES = {
    "gateway": "Run a gateway alone: HTTP, keys, futures.",
    "trainer": "Run a trainer alone: one base model.",
    "sampler": "Run a sampler alone: one base model.",
    "checkpointer": "Run the checkpointer alone.",
}
_EXAMPLE = """

\b
Example, against a broker elsewhere:
  TINSMITH_NATS_URL=nats://broker:4222 tinsmith {name} --config split.toml"""
for _name, _help in _SERVICES.items():
    _add_service(_name, _help + _EXAMPLE.format(name=_name))


@app.command(epilog=EXIT_CODES)
def prepare(config: ConfigFile = None) -> None:
    """Make the broker's streams, where services may not.

    That is where bus.create_streams is false. Also enters the master key that all services are to
    have. Do it once, and after an update.

    \b
    Example:
      TINSMITH_BUS__USER=operator TINSMITH_BUS__INBOX_PREFIX=_INBOX_operator tinsmith prepare
    """
    with _one_line_errors("prepare"):
        from tinsmith.cli import prepare as command

        command.run(config)


@app.command(epilog=EXIT_CODES)
def demo(
    data_dir: DataDir = None,
    keep: Annotated[  # noqa: FBT002
        bool, typer.Option("--keep", help="Leave the server running at the end, until Ctrl-C.")
    ] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Train only so many steps.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
) -> None:
    """Start a server, train a small model on it, show the effect.

    Exit code 1 also means that the model has not learned what it was taught. With
    TINKER_BASE_URL set, that server is used instead of a new one.

    \b
    Examples:
      tinsmith demo
      tinsmith demo --keep
      tinsmith demo --steps 5 --json results.json
    """
    with _one_line_errors("demo"):
        from tinsmith.demo import run

        sys.exit(run.main(data_dir=data_dir, keep=keep, steps=steps, json_path=json_path))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def cookbook(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="As in math_rl, or preference.dpo.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="For the recipe.")
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Run a recipe of tinker-cookbook, unmodified, on a server.

    The server is that of TINKER_BASE_URL, else the 'tinsmith up' that uses the data folder.

    \b
    Exit codes:
      2  it cannot be started: usage, configuration, missing environment, no server
      else, as the recipe ended

    \b
    Example:
      tinsmith cookbook math_rl env=arithmetic \\
        model_name=HuggingFaceTB/SmolLM2-135M-Instruct
    """
    with _one_line_errors("cookbook"):
        from tinsmith.cookbook import command

        command.run(recipe, arguments or [], config=config, data_dir=data_dir)


@app.command()
def replay(  # noqa: PLR0913, PLR0917 - typer makes the options of the parameters
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FILE",
            help="A run, or enough of its id; or an exported log.",
            show_default=False,
        ),
    ],
    first: Annotated[
        int, typer.Option("--from", min=0, metavar="N", help="First op to compare.")
    ] = 0,
    last: Annotated[
        int | None,
        typer.Option("--to", min=0, metavar="N", help="Last op to compare [default: the last]."),
    ] = None,
    spot_check: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="P", help="Only a random share of the parts between saved states."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Choose the same parts again [default: a new seed]."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, metavar="T", help="Numbers may differ by this much [default: no bit]."),
    ] = None,
    is_following: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--follow", help="Go on with what a live run does, until it differs or Ctrl-C."
        ),
    ] = False,
    is_sampling: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--sampling", help="Also draw again what was sampled from the run's weights."),
    ] = False,
    is_sampling_only: Annotated[  # noqa: FBT002
        bool, typer.Option("--sampling-only", help="Only draw samples again.")
    ] = False,
    is_alone: Alone = False,  # noqa: FBT002
    is_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,  # noqa: FBT002
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Do a run again from its log, and compare results and states.

    \b
    Exit codes:
      0  everything is equal
      1  something differs: its op and field are printed
      2  the check could not be made

    \b
    Examples:
      tinsmith replay 3fk2
      tinsmith replay run.tslog --json
      tinsmith replay 3fk2 --sampling --spot-check 0.1
    """
    from tinsmith.cli import replay as command

    options = command.Options(
        target=target,
        first=first,
        last=last,
        share=spot_check,
        seed=seed,
        tolerance=tolerance,
        is_following=is_following,
        is_alone=is_alone,
        is_sampling=is_sampling,
        is_sampling_only=is_sampling_only,
        is_json=is_json,
        config=config,
        data_dir=data_dir,
    )
    sys.exit(command.run(options))


app.command()(portable.export)
app.command("import")(portable.import_)
app.command()(collecting.gc)
app.command()(looking.status)
app.command()(models_list.models)
app.command()(examining.doctor)
app.command()(benching.bench)


@config_app.command("show", epilog=EXIT_CODES)
def config_show(
    config: ConfigFile = None,
    docs: Annotated[bool, typer.Option("--docs", help="Add what each key means.")] = False,  # noqa: FBT002
) -> None:
    """Print the resolved configuration as TOML.

    Each value that was set has its source beside it.

    \b
    Examples:
      tinsmith config show --docs
      TINSMITH_GATEWAY__PORT=9000 tinsmith config show --config split.toml
    """
    with _one_line_errors("config show"):
        import os

        from tinsmith.config import load
        from tinsmith.config_docs import render

        typer.echo(render(load(config, os.environ), has_docs=docs), nl=False)


@app.command(epilog=EXIT_CODES)
def version() -> None:
    """Print the version.

    \b
    Example:
      tinsmith version
    """
    typer.echo(f"tinsmith {__version__}")


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    try:
        yield
    except TinsmithError as error:
        from tinsmith import logs

        logs.report(command, error)
        raise typer.Exit(2 if isinstance(error, StartupError) else 1) from None

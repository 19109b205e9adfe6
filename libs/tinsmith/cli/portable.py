"""The commands that carry checkpoints out of an installation and into it: options and help."""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated

import typer

from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - as above
from tinsmith.errors import StartupError, TinsmithError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.config import Config

MAX_MESSAGE = 1000


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN/NAME",
            help="A run, or enough of its id, and a checkpoint of it; also RUN/KIND/NAME, or a "
            "tinker:// path.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)
    ],
    is_merged: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--merge", help="The base model with the adapter added, and its tokenizer's files."
        ),
    ] = False,
    is_without_unembed: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--no-unembed", help="Without the adapter of the output layer, if there is one."
        ),
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Write a checkpoint's weights as a folder for other tools.

    PEFT loads it; or transformers, with --merge.

    \b
    Exit codes:
      0  the folder is there
      1  there is no such checkpoint, or it cannot be had in this form; nothing was written
      2  usage, configuration, a package that is not installed, or the base model

    \b
    Examples:
      tinsmith export 3fk2/step100 adapter
      tinsmith export 3fk2/sampler_weights/final model --merge
    """
    from tinsmith.cli import export as command

    options = command.Options(
        checkpoint=checkpoint,
        folder=folder,
        is_merged=is_merged,
        has_unembed=not is_without_unembed,
    )
    _run("export", config, data_dir, lambda loaded: command.export(options, loaded))


def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="As PEFT's save_pretrained wrote it.", show_default=False
        ),
    ],
    base: Annotated[
        str,
        typer.Option(metavar="NAME", help="The base model, one of [[models]].", show_default=False),
    ],
    name: Annotated[str, typer.Option(metavar="X", help="Of the checkpoint.", show_default=False)],
    is_any_base: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--any-base", help="Even if the adapter names another base model."),
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Make a LoRA adapter from elsewhere a checkpoint.

    It can be sampled from, and trained on from; its optimizer starts afresh. It belongs to the
    owner of the key in TINKER_API_KEY, or that 'tinsmith up' made. A checkpointer must be running.

    \b
    Exit codes:
      0  the checkpoints are there; their paths are printed
      1  the adapter cannot be used here; nothing was written
      2  usage, configuration, a package that is not installed, or the base model

    \b
    Example:
      tinsmith import adapter --base Qwen/Qwen3-8B --name from-elsewhere
    """
    from tinsmith.cli import import_adapter as command

    options = command.Options(folder=folder, base=base, name=name, is_any_base=is_any_base)
    _run("import", config, data_dir, lambda loaded: command.import_adapter(options, loaded))


def _run(
    name: str, path: Path | None, data_dir: Path | None, work: Callable[[Config], str]
) -> None:
    """Print what ``work`` says, or in one line why it could not be done."""
    from tinsmith import config, logs
    from tinsmith.logbook.text import plain

    environ = dict(os.environ)
    if data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(data_dir.absolute())
    try:
        loaded = config.load(path, environ)
        logs.configure(loaded.logs, service=name, instance=name)
        typer.echo(plain(work(loaded), MAX_MESSAGE))
    except TinsmithError as error:
        logs.report(name, TinsmithError(plain(error, MAX_MESSAGE)))
        raise typer.Exit(2 if isinstance(error, StartupError) else 1) from None

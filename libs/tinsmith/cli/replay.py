"""``tinsmith replay``: finds the replays of trainer and sampler; the exit codes of a check."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from tinsmith import config, logs
from tinsmith.cli.foreground import require_extra
from tinsmith.errors import InvalidRequest, TinsmithError
from tinsmith.logbook.samples import is_session
from tinsmith.logbook.text import plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENTRY_POINTS = "tinsmith.commands"
"""Commands that a service brings: name -> ``main(options, config)``, which gives an exit code."""
COULD_NOT_RUN = 2
MAX_MESSAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    target: str  # a run, or the beginning of one; or an exported file
    first: int = 0
    last: int | None = None
    share: float | None = None
    seed: int | None = None
    tolerance: float | None = None
    is_following: bool = False
    is_alone: bool = False
    is_sampling: bool = False
    is_sampling_only: bool = False
    is_json: bool = False
    config: Path | None = None
    data_dir: Path | None = None


def run(options: Options) -> int:
    """0 equal, 1 diverged, 2 could not run.

    Whatever goes wrong is 2: a check that broke must not look like one that found something.
    """
    try:
        return _run(options)
    except TinsmithError as error:
        # Logs from elsewhere are quoted in it.
        logs.report("replay", TinsmithError(plain(error, MAX_MESSAGE)))
    except KeyboardInterrupt:
        sys.stderr.write("tinsmith replay: interrupted before it had an outcome\n")
    except Exception:  # noqa: BLE001 - the process's border, told in full
        traceback.print_exc()
    return COULD_NOT_RUN


def _run(options: Options) -> int:
    commands = _commands(options)
    for extra in commands.values():
        require_extra(extra)
    environ = dict(os.environ)
    if options.data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(options.data_dir.absolute())
    loaded = config.load(options.config, environ)
    logs.configure(loaded.logs, service="replay", instance="replay")
    return max([_command(name)(options, loaded) for name in commands])


def _commands(options: Options) -> dict[str, str]:
    """The names of the replays that are asked for, and the extra that each needs."""
    training, sampling = {"replay": "trainer"}, {"replay-sampling": "sampler"}
    if not (options.is_sampling or options.is_sampling_only):
        return training
    if options.is_following:
        raise InvalidRequest("--follow: samples are not followed; drop it, or the options on them")
    # A session has no training of its own, only samples from the base model.
    if not options.is_sampling_only and not is_session(options.target):
        return training | sampling
    if options.first or options.last is not None:
        raise InvalidRequest("--from, --to: they count ops, not samples; drop them")
    return sampling


def _command(name: str) -> Callable[[Options, config.Config], int]:
    (point,) = metadata.entry_points(group=ENTRY_POINTS, name=name)
    command: Callable[[Options, config.Config], int] = point.load()
    return command

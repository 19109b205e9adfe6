"""``tinsmith replay``: finds the trainer's replay and runs it; the exit codes of a check."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from tinsmith import config, logs
from tinsmith.cli.foreground import require_extra
from tinsmith.errors import TinsmithError
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
    require_extra("trainer")
    environ = dict(os.environ)
    if options.data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(options.data_dir.absolute())
    loaded = config.load(options.config, environ)
    logs.configure(loaded.logs, service="replay", instance="replay")
    (point,) = metadata.entry_points(group=ENTRY_POINTS, name="replay")
    main: Callable[[Options, config.Config], int] = point.load()
    return main(options, loaded)

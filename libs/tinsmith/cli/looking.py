"""Commands that look at an installation and tell what they see."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from tinsmith import config, logs
from tinsmith.errors import TinsmithError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from tinsmith.config import Config

    Main = Callable[[Config], Coroutine[Any, Any, int]]

OK, FOUND, FAILED = 0, 1, 2


def load(path: Path | None, data_dir: Path | None) -> Config:
    """The configuration, with ``--data-dir`` above all else. Raises ConfigError."""
    environ = dict(os.environ)
    if data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(data_dir.absolute())
    return config.load(path, environ)


def run(name: str, path: Path | None, data_dir: Path | None, main: Main) -> int:
    """Run ``main`` to its end; the exit code, which is 2 when it could not look."""
    # Also where a script has started us in the background, with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loaded = load(path, data_dir)
        logs.configure(loaded.logs, service=name, instance=name)
        return asyncio.run(main(loaded))
    except TinsmithError as error:
        logs.report(name, error)
    except KeyboardInterrupt:
        return OK
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return FAILED

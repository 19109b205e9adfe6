"""``tinsmith gc``: its options and its help; the checkpointer brings what it does."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated

import typer

from tinsmith.cli.options import ConfigFile, DataDir  # noqa: TC001 - typer reads annotations
from tinsmith.errors import TinsmithError

FAILED = 2


def gc(
    is_dry: Annotated[  # noqa: FBT002
        bool, typer.Option("--dry-run", help="Only say what is kept, why, and what would be freed.")
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Free blobs and logs that nothing needs any more.

    Blobs: no checkpoint, sampler, log, queue or result refers to them. Logs: [retention] does not
    keep them, and no checkpoint or living session needs them.

    What was put, or lost its last reference, less than checkpointer.grace_s ago stays. The
    checkpointer does the same by itself; both may run at once, with everything else.

    The installation is the broker of --config or TINSMITH_NATS_URL, or else the 'tinsmith up'
    that runs in --data-dir.

    \b
    Exit codes:
      0  done
      2  it could not be done: usage, configuration, broker, blob store

    \b
    Examples:
      tinsmith gc --dry-run
      tinsmith gc --json | jq .freed_bytes
    """
    from tinsmith import config as settings
    from tinsmith import logs
    from tinsmith.cli import service_commands

    environ = dict(os.environ)
    if data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(data_dir.absolute())
    try:
        main = service_commands.load("gc", extra="checkpointer")
        loaded = settings.load(config, environ)
        logs.configure(loaded.logs, service="gc", instance="gc")
        sys.exit(asyncio.run(main(loaded, is_dry=is_dry, is_json=is_json)))
    except TinsmithError as error:
        logs.report("gc", error)
        sys.exit(FAILED)

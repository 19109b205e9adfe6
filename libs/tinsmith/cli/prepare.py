"""``tinsmith prepare``: what services under users of their own may not make on the broker."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import TYPE_CHECKING

from msgspec import structs

from tinsmith import config, logs
from tinsmith.logbook import installation
from tinsmith.paths import DataDir
from tinsmith.sealing import Seals

if TYPE_CHECKING:
    from pathlib import Path

    from tinsmith.config import Config


def run(path: Path | None) -> None:
    """Make or update the streams, and enter the master key that services are to have.

    Raises:
        BrokerUnavailable: no broker answers, or it does not let this user.
        StartupError: the streams, or the master key, are others than these.
    """
    loaded = config.load(path, os.environ)
    logs.configure(loaded.logs, service="prepare", instance="prepare")
    asyncio.run(_prepare(loaded))


async def _prepare(loaded: Config) -> None:
    DataDir(loaded.data_dir).prepare()
    bus_config = structs.replace(loaded.bus, create_streams=True)
    able = dataclasses.replace(loaded, bus=bus_config)
    async with installation.connect(able, name="prepare") as (bus, _):
        await bus.ensure()
        async with Seals.serving(bus, able):
            return

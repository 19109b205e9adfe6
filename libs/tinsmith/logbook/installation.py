"""Reaching a running installation from a command line: its broker and its blob store."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.paths import DataDir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.config import BusConfig, Config


@asynccontextmanager
async def connect(config: Config, *, name: str) -> AsyncIterator[tuple[Bus, BlobStore]]:
    """Bus and blobs of the installation that ``config`` means; creates no streams.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    blobs = BlobStore.configured(config.blobs, default=DataDir(config.data_dir).blobs)
    async with Bus.connect(bus_config(config), name=name, blobs=blobs) as bus:
        yield bus, blobs


def bus_config(config: Config) -> BusConfig:
    """The configured broker, or else the one of the ``tinsmith up`` that runs in ``data_dir``."""
    if "bus.url" in config.origins:
        return config.bus
    try:
        told = json.loads(DataDir(config.data_dir).up_file.read_text())
    except FileNotFoundError:
        return config.bus
    return msgspec.structs.replace(config.bus, url=told["nats_url"])

"""What a service's main coroutine is given, for services that run in the test's process."""

from __future__ import annotations

import asyncio

import structlog

from tinsmith.config import Config
from tinsmith.sealing import Seals
from tinsmith.service import ServiceContext


def context_of(instance, bus, blobs, config=None, log=None):
    """That of the service whose name ``instance`` begins with."""
    config = config or Config()
    return ServiceContext(
        name=instance.partition("-")[0],
        config=config,
        bus=bus,
        blobs=blobs,
        seals=Seals(bus, config),
        instance=instance,
        stopping=asyncio.Event(),
        log=log or structlog.get_logger(),
    )

"""The broker as deploy/nats has it, with TLS and a user for each service."""

from __future__ import annotations

import asyncio

import pytest
from tests.deploy import authority
from tests.deploy.shipped import ShippedBroker

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.bus.permissions import OPERATOR


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    return authority.issue(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory, tls):
    """The single server, its streams made by the operator."""
    folder = tmp_path_factory.mktemp("broker")
    running = ShippedBroker("single.conf", folder, tls)
    running.start()
    try:
        asyncio.run(prepare(running, folder))
        yield running
    finally:
        running.kill()


async def prepare(broker, folder):
    blobs = BlobStore.open("", default=folder / "blobs")
    async with Bus.connect(broker.bus_config(OPERATOR), name=OPERATOR, blobs=blobs) as bus:
        await bus.ensure()

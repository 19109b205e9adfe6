"""Fixtures that more than one suite needs: a real broker, and a bus on it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads starve the services under test
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.paths import DataDir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A nats-server of its own, on a free port, with a store that restarts keep."""
    data = DataDir(tmp_path / "data")
    data.prepare()
    server = Broker(data.nats, data.run)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """An empty blob store."""
    return BlobStore.open("", default=tmp_path / "blobs")


@pytest.fixture
async def bus(broker: Broker, blobs: BlobStore) -> AsyncIterator[Bus]:
    """A connection with all streams in place."""
    async with Bus.connect(BusConfig(url=broker.url), name="test", blobs=blobs) as connected:
        await connected.ensure()
        yield connected

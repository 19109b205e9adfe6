"""Fixtures that more than one suite needs: a real broker, and a bus on it."""

from __future__ import annotations

import logging
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings

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

# No test depends on how busy the machine is.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test configures is of the whole process, and the next one's is none of its own."""
    was_configured, level = structlog.is_configured(), logging.getLogger().level
    yield
    if structlog.is_configured() and not was_configured:
        root = logging.getLogger()
        ours = structlog.stdlib.ProcessorFormatter
        root.handlers[:] = [one for one in root.handlers if not isinstance(one.formatter, ours)]
        root.setLevel(level)
        logging.captureWarnings(capture=False)
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()


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
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB, where the machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
async def bus(broker: Broker, blobs: BlobStore) -> AsyncIterator[Bus]:
    """A connection with all streams in place."""
    async with Bus.connect(BusConfig(url=broker.url), name="test", blobs=blobs) as connected:
        await connected.ensure()
        yield connected

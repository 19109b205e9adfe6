"""The broker's disk is full: whoever writes hears of it, and can again once there is room."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.bus.test_queue import TOKEN, put

from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.errors import ServerError
from tinsmith.messages import ops, table
from tinsmith.messages.base import Tensor
from tinsmith.paths import DataDir

pytestmark = pytest.mark.integration

BALLAST = 24 << 20


@pytest.fixture
def cramped_broker(small_disk):
    data = DataDir(small_disk)
    data.prepare()
    server = Broker(data.nats, data.run)
    server.start()
    yield server
    server.kill()


async def fill(bus, body):
    for seq in range(100):
        await put(bus, seq, body)


async def test_work_that_finds_no_room_fails_with_a_reason_and_fits_again_later(
    cramped_broker, small_disk, tmp_path, monkeypatch
):
    monkeypatch.setattr("tinsmith.bus.wire.PUBLISH_PATIENCE_S", 2.0)
    blobs = BlobStore.open("", default=tmp_path / "blobs")
    body = ops.ForwardBackward(
        data=(ops.Datum(tokens=Tensor("int32", (50_000,), bytes(200_000)), inputs={}),), loss_fn="x"
    )
    ballast = small_disk / "ballast"
    async with Bus.connect(BusConfig(url=cramped_broker.url), name="x", blobs=blobs) as bus:
        await bus.ensure()
        ballast.write_bytes(bytes(BALLAST))
        with pytest.raises(ServerError, match=r"full|broker did not accept"):
            await fill(bus, body)
        ballast.unlink()
        await asyncio.to_thread(cramped_broker.kill)
        await asyncio.to_thread(cramped_broker.restart)
        await put(bus, 1000)

        assert await bus.is_queued(table.OPS, model=TOKEN, seq="1000")

"""Connecting to a broker that does not answer as one."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.errors import BrokerUnavailable

PATIENCE_S = 60.0


async def test_nothing_is_left_open_to_who_accepts_and_says_nothing(tmp_path):
    ended = asyncio.Event()

    async def accept(reader, writer):
        await reader.read()  # until the other side has closed
        writer.close()
        ended.set()

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with silent:
        place = "nats://{}:{}".format(*silent.sockets[0].getsockname())
        config = BusConfig(url=place, connect_timeout_s=0.2)
        blobs = BlobStore.open("", default=tmp_path)
        with pytest.raises(BrokerUnavailable, match="no NATS server answers"):
            async with Bus.connect(config, name="test", blobs=blobs):
                pass
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()

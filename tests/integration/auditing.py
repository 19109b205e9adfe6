"""A look behind a running server: its broker and its blobs, as an auditor reads them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.config import BusConfig


@asynccontextmanager
async def bus_of(server):
    url = json.loads((server.folder / "ready.json").read_text())["nats_url"]
    blobs = BlobStore.open("", default=server.folder / "data" / "blobs")
    patient = BusConfig(url=url, connect_timeout_s=30)
    async with Bus.connect(patient, name="auditor", blobs=blobs) as bus:
        yield bus

"""The checkpointer prunes logs as the user of the broker that it is."""

from __future__ import annotations

import structlog
from tests.integration.storage.test_pruning import MONTH, ended_run, entries_of

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.bus.permissions import OPERATOR
from tinsmith_checkpointer.pruning import Pruner


async def test_its_rights_are_enough(broker, tmp_path):
    blobs = BlobStore.open("", default=tmp_path)
    async with (
        Bus.connect(broker.bus_config(OPERATOR), name=OPERATOR, blobs=blobs) as operator,
        Bus.connect(broker.bus_config("checkpointer"), name="checkpointer", blobs=blobs) as bus,
    ):
        run = await ended_run(operator, blobs)
        pruner = Pruner(bus, MONTH, structlog.get_logger(), instance="checkpointer")
        await pruner.go_round()

        assert (await operator.pruning.of(run)).is_removed
        assert await entries_of(operator, run) == [0, 0, 0, 0]

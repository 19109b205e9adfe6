"""An engine that dies takes its process with it, so that a new one is started."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.conftest import MODEL
from tests.integration.contexts import context_of

from tinsmith.config import Config, ModelConfig
from tinsmith.errors import ServerError
from tinsmith_sampler import service
from tinsmith_sampler.torch_engine import TorchEngine


async def test_the_service_ends_with_its_engine(bus, blobs, model_folder, tmp_path, monkeypatch):
    engines = []
    start = TorchEngine.start

    async def remembered(self):
        engines.append(self)
        await start(self)

    monkeypatch.setattr(TorchEngine, "start", remembered)
    config = Config(models=(ModelConfig(name=MODEL, path=str(model_folder)),))
    context = context_of("sampler-x", bus, blobs, config)
    serving = asyncio.create_task(service.serve(context))
    while context.alive is None:
        await asyncio.sleep(0.01)

    def die(batcher):
        raise MemoryError

    engines[0]._mailbox.put(die)
    with pytest.raises(ServerError):
        await asyncio.wait_for(serving, 30)

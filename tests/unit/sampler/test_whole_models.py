"""Models that were trained whole: their own numbers, one in memory at a time, clear refusals."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from blake3 import blake3
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.sampler.oracles import Oracle

from tinsmith.adapters import version_of
from tinsmith.errors import BlobMissing, NotSupported, ServerError
from tinsmith.messages.base import BlobRef
from tinsmith.messages.sampling import AdapterRef
from tinsmith.testing import tiny_model
from tinsmith_sampler import model as model_module
from tinsmith_sampler.model import TorchOptions
from tinsmith_sampler.whole_models import WholeModels


class Stored:
    """Weights in a store, as a checkpoint has them."""

    def __init__(self, folder):
        self.folder = folder
        self.blobs, files = {}, {}
        for name in ("config.json", "model.safetensors"):
            data = (folder / name).read_bytes()
            files[name] = BlobRef(blake3(data).hexdigest(), len(data))
            self.blobs[files[name].blake3] = data
        self.ref = AdapterRef(version=version_of(files), files=files)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two models of the base's shape, as training would have made them."""
    folder = tmp_path_factory.mktemp("trained")
    return [Stored(tiny_model.build(folder / str(seed), seed=seed)) for seed in (1, 2)]


@asynccontextmanager
async def shelf(base, stored, tmp_path, limit=1):
    blobs = {digest: data for one in stored for digest, data in one.blobs.items()}

    async def get(ref):
        if ref.blake3 not in blobs:
            raise BlobMissing(f"blob {ref.blake3} is not there")
        return blobs[ref.blake3]

    options = TorchOptions(model_path=str(base), kv_tokens=4096)
    models = WholeModels(options, get, limit=limit, folder=tmp_path)
    try:
        yield models
    finally:
        await models.close()


async def test_each_draws_by_its_own_numbers_though_there_is_room_for_one(
    models, trained, tmp_path
):
    async with shelf(models["llama"], trained, tmp_path) as wholes:
        for one in (*trained, trained[0]):
            async with wholes.hold(one.ref) as engine:
                made = await engine.generate(row(prompt=prompt(9), adapter=one.ref.version))
                scored = await engine.score(scoring(prompt(20), adapter=one.ref.version))
            oracle = Oracle(one.folder)
            expected = oracle.logprobs(prompt(9), made.tokens)
            assert made.logprobs == pytest.approx(expected, abs=2e-5)
            assert np.isfinite(scored.logprobs[1:]).all()
            assert len(wholes._engines) == 1
    assert list(tmp_path.iterdir()) == []


async def test_who_comes_while_another_is_in_use_waits_for_it(models, trained, tmp_path):
    async with shelf(models["llama"], trained, tmp_path) as wholes:
        entered = asyncio.Event()

        async def use_second():
            async with wholes.hold(trained[1].ref):
                entered.set()

        async with wholes.hold(trained[0].ref) as engine:
            waiting = asyncio.create_task(use_second())
            made = await engine.generate(row(adapter=trained[0].ref.version))
            assert not entered.is_set()
        await waiting

    assert len(made.tokens) == 8


async def test_a_sampler_without_whole_models_says_what_to_set(models, trained, tmp_path):
    async with shelf(models["llama"], trained, tmp_path, limit=0) as wholes:
        with pytest.raises(NotSupported, match="set full = true"):
            async with wholes.hold(trained[0].ref):
                pass


async def test_too_little_memory_is_said_with_figures_and_leaves_nothing(
    models, trained, tmp_path, monkeypatch
):
    async with shelf(models["llama"], trained, tmp_path) as wholes:
        with monkeypatch.context() as patched:
            patched.setattr(model_module.memory, "available_bytes", lambda: 1000)
            with pytest.raises(ServerError, match=r"needs about \d.* GiB free; "):
                async with wholes.hold(trained[0].ref):
                    pass
        assert list(tmp_path.iterdir()) == []
        async with wholes.hold(trained[0].ref) as engine:  # the next one tries anew
            await engine.generate(row())


async def test_weights_that_are_gone_or_damaged_fail_their_request_alone(models, trained, tmp_path):
    gone, damaged = (Stored(one.folder) for one in trained)
    gone.blobs.clear()
    damaged.blobs = dict.fromkeys(damaged.blobs, b"{")
    for one, error in ((gone, BlobMissing), (damaged, ServerError)):
        async with shelf(models["llama"], [one], tmp_path) as wholes:
            with pytest.raises(error):
                async with wholes.hold(one.ref):
                    pass
    assert list(tmp_path.iterdir()) == []


async def test_what_a_killed_process_left_is_removed(models, trained, tmp_path):
    left = tmp_path / "whole-999999999-abc"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"x")
    async with shelf(models["llama"], trained, tmp_path):
        assert list(tmp_path.iterdir()) == []

"""An adapter that `tinsmith export` has written, in SGLang's own hands: loaded from its folder."""

from __future__ import annotations

import asyncio
import json
import secrets
import time

import numpy as np
import pytest
from tests.unit.sampler.examples import prompt, scoring
from tests.unit.trainer.examples import cross_entropy, random_datum

from tinsmith import ids
from tinsmith.cli.export import Options, export
from tinsmith.config import BusConfig, Config
from tinsmith.messages import table
from tinsmith.messages.checkpoints import Checkpoint
from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith_sampler.sglang.http import Http
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

PROMPT = prompt(40)
CLOSE = 1e-3  # log-probabilities in float32, by two implementations
CONTROL_S = 120.0
SHAPE = LoraShape(rank=8)


@pytest.fixture(scope="module")
def trained(model):
    """The files of an adapter that has learned something, in all layers."""
    engine = TrainingEngine(base_model.load(str(model), name="tiny"))
    engine.create("m", SHAPE)
    for step in range(10):
        engine.forward_backward("m", cross_entropy(random_datum(24, seed=step)))
        engine.optim_step("m", OptimStep(learning_rate=1e-2))
    return to_files(engine.snapshot("m"), with_optimizer=False)


@pytest.fixture
async def saved(bus, blobs, trained):
    """The path of a checkpoint of it."""
    path = ids.CheckpointPath(ids.model_id(ids.new_session_id(), 0), "sampler_weights", "x")
    parts = {name: await blobs.put(data) for name, data in trained.items()}
    entry = Checkpoint(
        path=str(path),
        model_id=path.model_id,
        kind="sampler_weights",
        name="x",
        op_seq=1,
        base_model="tiny",
        lora=SHAPE,
        step=10,
        parts=parts,
        size_bytes=sum(ref.size for ref in parts.values()),
        created_ns=time.time_ns(),
    )
    await bus.table(table.CHECKPOINTS).put(ids.checkpoint_key(path), entry)
    return entry.path


@pytest.fixture
async def plain(server):
    """Calls of SGLang's own, with nothing of our client."""
    http = Http(server.url, server.key)

    async def call(path, body):
        return json.loads(await http.post(path, body, timeout_s=CONTROL_S))

    yield call
    await http.close()


async def scores(plain, adapter):
    """Log-probabilities of the prompt's tokens but the first."""
    body = {
        "input_ids": PROMPT.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "lora_path": adapter,
    }
    answer = await plain("/generate", body)
    return np.array([one[0] for one in answer["meta_info"]["input_token_logprobs"][1:]])


@pytest.mark.parametrize("has_unembed", [True, False])
async def test_an_exported_adapter_serves_from_its_folder_what_we_serve(
    server, plain, built_in, broker, saved, tmp_path, has_unembed
):
    folder = tmp_path / "exported"
    config = Config(data_dir=tmp_path, bus=BusConfig(url=broker.url), origins={"bus.url": "test"})
    options = Options(checkpoint=saved, folder=folder, has_unembed=has_unembed)
    await asyncio.to_thread(export, options, config)
    name = f"exported-{secrets.token_hex(4)}"
    loaded = await plain("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    try:
        found, bare = await scores(plain, name), await scores(plain, None)
    finally:
        await plain("/unload_lora_adapter", {"lora_name": name})
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    await built_in.load_adapter("exported", files)
    expected = await built_in.score(scoring(PROMPT, adapter="exported"))

    assert loaded["success"], loaded
    assert (b"lm_head" in files["adapter_model.safetensors"]) == has_unembed
    np.testing.assert_allclose(found, expected.logprobs[1:], rtol=0, atol=CLOSE)
    assert np.abs(found - bare).max() > 100 * CLOSE, "the adapter does something"

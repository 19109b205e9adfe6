"""Adapters in the SGLang engine: each row its own, and never one that was let go."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.sglang.engines import EXACT, MAX_RANK, engine_on
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.sampler.oracles import ALL_LINEAR, adapter_files, save_adapter

from tinsmith.errors import InvalidRequest, ServerError

PROMPT = prompt(20)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FORMS = {
    "all": {"rank": 4, "targets": ALL_LINEAR},
    "some": {"rank": 16, "targets": ("q_proj", "down_proj")},
    "mlp": {"rank": 1, "targets": ("gate_proj", "up_proj", "down_proj")},
    "head": {"rank": 8, "targets": ("lm_head",)},
}


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapter_files(save_adapter(model, root / name, seed=seed, **form))
        for seed, (name, form) in enumerate(FORMS.items())
    }


async def test_rows_of_one_batch_each_have_their_adapter(engine, built_in, adapters):
    for name, files in adapters.items():
        await engine.load_adapter(name, files)
        await built_in.load_adapter(name, files)
    names = [None, *adapters, None, *reversed(adapters)]
    made = await asyncio.gather(
        *(engine.generate(row(prompt=PROMPT, adapter=name, max_tokens=10)) for name in names)
    )

    for name, drawn in zip(names, made, strict=True):
        tokens = np.concatenate([PROMPT, drawn.tokens])
        ours, true = [await one.score(scoring(tokens, adapter=name)) for one in (engine, built_in)]
        np.testing.assert_allclose(drawn.logprobs, true.logprobs[20:], rtol=0, atol=EXACT)
        np.testing.assert_allclose(ours.logprobs[1:], true.logprobs[1:], rtol=0, atol=EXACT)


async def test_an_adapter_that_was_let_go_is_never_named(engine, adapters):
    await engine.load_adapter("all", adapters["all"])
    await engine.unload_adapter("all")

    with pytest.raises(ServerError, match="adapter all: it is not loaded"):
        await engine.generate(row(adapter="all"))


async def test_the_same_version_may_come_back(engine, adapters):
    asked = row(prompt=PROMPT, adapter="all", seed=5)
    await engine.load_adapter("all", adapters["all"])
    before = await engine.generate(asked)
    await engine.unload_adapter("all")
    await engine.load_adapter("all", adapters["all"])

    assert (await engine.generate(asked)).tokens.tolist() == before.tokens.tolist()


async def test_rows_end_as_if_their_adapter_were_still_there(engine, adapters):
    """More of them than the server takes at once: some are not even there when it is let go."""
    await engine.load_adapter("all", adapters["all"])
    asked = [row(prompt=PROMPT, adapter="all", seed=seed, max_tokens=60) for seed in range(30)]
    drawing = [asyncio.create_task(engine.generate(one)) for one in asked]
    await asyncio.sleep(0)  # each has begun
    await engine.unload_adapter("all")
    made = await asyncio.gather(*drawing)

    await engine.load_adapter("all", adapters["all"])
    assert [one.tokens.tolist() for one in made[:3]] == [
        (await engine.generate(one)).tokens.tolist() for one in asked[:3]
    ]


async def test_loading_twice_at_once_is_loading_once(engine, adapters):
    await asyncio.gather(*(engine.load_adapter("all", adapters["all"]) for _ in range(4)))

    assert (await engine.generate(row(adapter="all"))).stop_reason == "length"
    await engine.unload_adapter("all")
    with pytest.raises(ServerError, match="not loaded"):
        await engine.generate(row(adapter="all"))


async def test_a_rank_over_the_limit_is_refused_with_both_figures(engine, model, tmp_path):
    files = adapter_files(save_adapter(model, tmp_path, seed=1, rank=MAX_RANK + 1))

    with pytest.raises(InvalidRequest, match=r"r = 17 is not in 1\.\.16.*max_lora_rank"):
        await engine.load_adapter("wide", files)


async def test_an_adapter_of_another_model_never_reaches_the_server(engine, adapters):
    files = dict(adapters["all"])
    name = "adapter_model.safetensors"
    files[name] = files[name].replace(b"model.layers.1.", b"model.layers.7.")

    with pytest.raises(InvalidRequest, match=r"no linear layer 'model\.layers\.7\."):
        await engine.load_adapter("deep", files)
    assert (await engine.generate(row())).stop_reason == "length"


async def test_an_engine_leaves_a_given_server_without_its_adapters(server, client, adapters):
    async with engine_on(server) as engine:
        await engine.load_adapter("all", adapters["all"])
        (there,) = [one.there for one in engine._starts._client._adapters._loaded.values()]
        assert there in await loaded_in(client)

    assert there not in await loaded_in(client)


async def loaded_in(client):
    """What the server itself says it has."""
    return (await client._http.get("/v1/models", timeout_s=60)).decode()

"""Replacing weights of a real server, and pausing it meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from safetensors.torch import load_file
from tests.sglang.requests import PROMPT, request, scores, scoring, true_scores
from transformers import AutoModelForCausalLM

from tinsmith_sampler.sglang.failures import SglangUnsafe

EXACT = 1e-4
NORM = "model.norm.weight"


@pytest.fixture
async def weights(client, model):
    """Of the checkpoint; the server has them again afterwards."""
    original = load_file(model / "model.safetensors")
    yield original
    await client.begin_update()
    await client.update_tensors(original.items(), weight_version="default")
    await client.end_update()


async def test_replaced_tensors_count_at_once(client, model, weights):
    before = await client.checksums()
    await client.begin_update()
    await client.update_tensors([(NORM, 2 * weights[NORM])], weight_version="v1")
    await client.end_update()

    hf_model = AutoModelForCausalLM.from_pretrained(model)
    hf_model.model.norm.weight.data *= 2
    answer = await client.generate(scoring(PROMPT))
    assert scores(answer) == pytest.approx(true_scores(hf_model, PROMPT), abs=EXACT)
    assert answer.meta_info.weight_version == "v1"
    assert (await client.model_info()).weight_version == "v1"
    after = await client.checksums()
    assert {name for name in before if before[name] != after[name]} == {NORM}


async def test_weights_come_back_bit_for_bit(client, weights):
    before = await client.checksums()
    for factor in (3, 1):
        await client.begin_update()
        await client.update_tensors((name, factor * tensor) for name, tensor in weights.items())
        await client.end_update()

    assert await client.checksums() == before


async def test_an_update_is_not_begun_twice(client):
    await client.begin_update()
    with pytest.raises(SglangUnsafe, match="end it first"):
        await client.begin_update()
    await client.end_update()
    with pytest.raises(SglangUnsafe, match="none can be ended"):
        await client.end_update()


async def test_tensors_outside_an_update_are_not_sent(client, weights):
    with pytest.raises(SglangUnsafe, match="begin one first"):
        await client.update_tensors([(NORM, weights[NORM])])


async def test_rows_go_on_after_a_pause_with_the_weights_of_each_token(client, weights):
    stream = client.stream(request("long", tokens=300, ignore_eos=True))
    await anext(stream)
    await client.pause()
    await client.begin_update()
    await client.update_tensors([(NORM, 2 * weights[NORM])], weight_version="v2")
    await client.end_update()
    await client.resume()
    *_, last = [part async for part in stream]

    spans = last.meta_info.weight_versions
    assert [span.version for span in spans] == ["default", "v2"]
    assert (spans[0].start, spans[-1].end) == (0, 300)
    assert spans[0].end == spans[1].start


async def test_what_arrives_in_a_pause_is_answered_after_it(client):
    await client.pause()
    waiting = asyncio.create_task(client.generate(request()))
    await client.checksums()
    assert not waiting.done()
    await client.resume()

    assert len((await waiting).output_ids) == 8

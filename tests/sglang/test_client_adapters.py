"""Adapters in a real server: what would have it hang, die or lie is not sent to it."""

from __future__ import annotations

import asyncio
import base64
import pickle

import pytest
import torch
from tests.sglang.requests import (
    PROMPT,
    adapter,
    request,
    scores,
    scoring,
    true_scores,
    with_adapter,
)
from transformers import AutoModelForCausalLM

from tinsmith_sampler.lora_layers import LayerShape
from tinsmith_sampler.sglang import fused, payload, wire
from tinsmith_sampler.sglang.failures import SglangRefused, SglangUnsafe

EXACT = 1e-4
TOKENS = [*PROMPT, 80, 81, 200]


def true_of(model, config, tensors):
    hf_model = AutoModelForCausalLM.from_pretrained(model)
    return true_scores(with_adapter(hf_model, config, tensors), TOKENS)


async def scores_of(client, name):
    return scores(await client.generate(scoring(TOKENS, adapter=name)))


async def test_adapters_of_one_batch_each_get_their_own_weights(client, model):
    """The last layer too, where SGLang on CPUs takes another row's."""
    made = {f"a{seed}": adapter(model, seed, unembedding=True) for seed in range(3)}
    for name, content in made.items():
        await client.load_adapter_from_tensors(name, *content)
    base = true_scores(AutoModelForCausalLM.from_pretrained(model), TOKENS)

    names = [None, "a0", "a1", "a2", None, "a1", "a0"]
    found = await asyncio.gather(*(scores_of(client, name) for name in names))
    first = await asyncio.gather(
        *(client.generate(request(prompt=TOKENS[:-1], adapter=name, tokens=1)) for name in names)
    )

    for name, got, drawn in zip(names, found, first, strict=True):
        assert got == pytest.approx(true_of(model, *made[name]) if name else base, abs=EXACT)
        prompt = [*TOKENS[:-1], *drawn.output_ids]
        again = scores(await client.generate(scoring(prompt, adapter=name)))[-1]
        assert drawn.meta_info.output_token_logprobs[0][0] == pytest.approx(again, abs=EXACT)
    for name in made:
        await client.unload_adapter(name)


@pytest.mark.parametrize("layers", [("q_proj",), ("v_proj",), ("k_proj", "v_proj")])
async def test_an_adapter_of_few_layers_changes_those_and_no_others(client, model, layers):
    """After others have had its place in the server's memory, too."""
    for count in range(4):
        await client.load_adapter_from_tensors(f"a{count}", *adapter(model, count))
        await scores_of(client, f"a{count}")
        await client.unload_adapter(f"a{count}")
    config, tensors = adapter(model, 9, layers=layers, depth=1)

    await client.load_adapter_from_tensors("few", config, completed(model, tensors))
    found = await scores_of(client, "few")
    await client.unload_adapter("few")
    assert found == pytest.approx(true_of(model, config, tensors), abs=EXACT)


def completed(model, tensors):
    """As the engine sends them."""
    pairs = {}
    for name, tensor in tensors.items():
        layer, _, side = name.removeprefix("base_model.model.").rpartition(".lora_")
        pairs.setdefault(layer, {})[side[0]] = tensor
    layers = {
        name: LayerShape(layer.in_features, layer.out_features)
        for name, layer in AutoModelForCausalLM.from_pretrained(model).named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    return {
        f"base_model.model.{layer}.lora_{side}.weight": tensor
        for layer, pair in fused.completed(pairs, layers).items()
        for side, tensor in pair.items()
    }


async def test_a_name_in_use_is_not_loaded_again(client, model):
    await client.load_adapter_from_tensors("x", *adapter(model, 1))
    before = await scores_of(client, "x")
    with pytest.raises(SglangUnsafe, match="loaded already"):
        await client.load_adapter_from_tensors("x", *adapter(model, 2))

    assert await scores_of(client, "x") == before
    await client.unload_adapter("x")


async def test_a_name_can_come_back_with_other_weights(client, model):
    await client.load_adapter_from_tensors("x", *adapter(model, 1))
    await client.unload_adapter("x")
    other = adapter(model, 2)
    await client.load_adapter_from_tensors("x", *other)

    assert await scores_of(client, "x") == pytest.approx(true_of(model, *other), abs=EXACT)
    await client.unload_adapter("x")


async def test_an_unloaded_adapter_does_not_answer(client, model):
    await client.load_adapter_from_tensors("x", *adapter(model, 1))
    await client.unload_adapter("x")

    assert client.adapters == frozenset()
    with pytest.raises(SglangUnsafe, match="not loaded"):
        await client.generate(request(adapter="x"))
    with pytest.raises(SglangUnsafe, match="not loaded"):
        await client.unload_adapter("x")


async def test_an_unload_in_a_pause_waits_for_its_end(client, model):
    await client.load_adapter_from_tensors("x", *adapter(model, 1))
    await client.pause()
    unload = asyncio.create_task(client.unload_adapter("x"))
    # The server answers meanwhile, also to what it hangs on once an unload has been sent.
    await client.load_adapter_from_tensors("y", *adapter(model, 2))

    assert not unload.done()
    assert client.adapters == {"y"}
    await client.resume()
    await unload
    await client.unload_adapter("y")


async def test_an_unload_lets_others_load_while_a_row_uses_the_adapter(client, model):
    await client.load_adapter_from_tensors("x", *adapter(model, 1))
    long = request("long", adapter="x", tokens=1800, ignore_eos=True)
    stream = client.stream(long)
    await anext(stream)
    unload = asyncio.create_task(client.unload_adapter("x"))
    await client.load_adapter_from_tensors("y", *adapter(model, 2))

    assert not unload.done()
    await client.abort("long")
    assert [part async for part in stream][-1].meta_info.finish_reason.type == "abort"
    await unload
    await client.unload_adapter("y")


async def test_a_refused_adapter_leaves_its_name_free(client, model):
    config, tensors = adapter(model, 1)
    wide = {
        name: torch.cat([tensor] * 8, dim=0 if "lora_A" in name else 1)
        for name, tensor in tensors.items()
    }
    with pytest.raises(SglangRefused, match="rank"):
        await client.load_adapter_from_tensors("x", {**config, "r": 32}, wide)

    await client.load_adapter_from_tensors("x", config, tensors)
    await client.unload_adapter("x")


async def test_checksums_that_end_a_server_cannot_be_sent():
    assert "expected_checksums" not in wire.LoadAdapter.__struct_fields__


def test_a_view_is_sent_without_what_it_is_a_view_of():
    whole = torch.zeros(1000, 1000)

    assert len(payload.of_adapter({"a": whole[:2, :2]})) < 2000
    assert len(payload.of_weights([("a", whole[0, :2])])) < 2000


def test_only_plain_tensors_under_plain_names_are_sent():
    class Name(str):
        pass

    with pytest.raises(TypeError, match="plain string"):
        payload.of_adapter({Name("a"): torch.zeros(1)})
    with pytest.raises(TypeError, match="dense"):
        payload.of_adapter({"a": torch.zeros(1).to_sparse()})
    sent = payload.of_adapter({"a": torch.nn.Parameter(torch.zeros(1))})
    assert type(pickle.loads(base64.b64decode(sent))["a"]) is torch.Tensor

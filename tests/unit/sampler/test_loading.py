"""Models that the torch engine serves, and one line for each that it would compute wrongly."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.unit.sampler.engines import running
from tests.unit.sampler.examples import prompt, row
from tests.unit.sampler.oracles import Oracle
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from tinsmith import model_files
from tinsmith.errors import NotSupported, StartupError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SERVED = {
    "biases": Qwen2Config(**SIZES),
    "no window": MistralConfig(**SIZES, sliding_window=None),
    "linear rope": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0}),
}


async def refused(folder, config) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(StartupError) as refusal:
        async with running(folder):
            pass
    return str(refusal.value)


async def test_rope_that_follows_the_longest_row_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0}

    said = await refused(tmp_path, LlamaConfig(**SIZES, rope_parameters=rope))
    assert "has dynamic rotary embeddings" in said


async def test_logits_that_are_scaled_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(model_files.FAMILIES, "granite", "Granite")

    said = await refused(tmp_path, GraniteConfig(**SIZES, logits_scaling=8.0))
    assert "changes its logits after the head" in said


async def test_an_unknown_architecture_is_refused_before_loading(tmp_path, monkeypatch):
    monkeypatch.setattr("tinsmith_sampler.model.load_model", None)  # never reached

    said = await refused(tmp_path, GraniteConfig(**SIZES))
    assert "unknown architecture, 'granite'; Tinsmith serves gemma, " in said


async def test_too_little_memory_is_told_in_figures_before_loading(models, monkeypatch):
    monkeypatch.setattr("tinsmith_sampler.model.load_model", None)  # never reached
    monkeypatch.setattr("tinsmith.memory.available_bytes", lambda: 1 << 20)

    with pytest.raises(StartupError, match=r"0\.50 GiB for a cache of 1048576 tokens\).*lower the"):
        async with running(models["llama"], kv_tokens=1 << 20):
            pass


@pytest.mark.parametrize("kind", SERVED)
async def test_other_families_have_the_logprobs_of_hugging_face(tmp_path, kind):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SERVED[kind]).save_pretrained(tmp_path)
    async with running(tmp_path) as engine:
        made = await engine.generate(row(prompt=prompt(40) % 61, max_tokens=30))

    expected = Oracle(tmp_path).logprobs(prompt(40) % 61, made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=5e-5)


async def test_without_a_tokenizer_stop_strings_are_refused_and_the_rest_is_served(
    tmp_path, models
):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(models["llama"] / name, tmp_path)
    async with running(tmp_path) as engine:
        assert len((await engine.generate(row())).tokens) == 8
        with pytest.raises(NotSupported, match=r"stop: .* without a tokenizer"):
            await engine.generate(row(stop_strings=("x",)))

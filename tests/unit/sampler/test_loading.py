"""Models that the torch engine serves, and one line for each that it would compute wrongly."""

from __future__ import annotations

import shutil

import pytest
from tests.unit.sampler.engines import running
from tests.unit.sampler.examples import prompt, row
from tests.unit.sampler.oracles import Oracle
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

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
UNSERVED = {
    "sliding windows": (
        Gemma2Config(**SIZES, head_dim=8, sliding_window=16),
        "has layers of kind .'sliding_attention'.",
    ),
    "rope that follows the longest row": (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "has dynamic rotary embeddings",
    ),
    "logits that are scaled": (GraniteConfig(**SIZES, logits_scaling=8.0), "changes its logits"),
}
SERVED = {
    "biases": Qwen2Config(**SIZES),
    "no window": MistralConfig(**SIZES, sliding_window=None),
    "linear rope": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0}),
}


@pytest.mark.parametrize("kind", UNSERVED)
async def test_what_would_come_out_wrong_is_refused_at_the_start(tmp_path, kind):
    config, said = UNSERVED[kind]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    with pytest.raises(StartupError, match=f"{said}.*serve it with SGLang"):
        async with running(tmp_path):
            pass


@pytest.mark.parametrize("kind", SERVED)
async def test_other_families_have_the_logprobs_of_hugging_face(tmp_path, kind):
    AutoModelForCausalLM.from_config(SERVED[kind]).save_pretrained(tmp_path)
    async with running(tmp_path) as engine:
        made = await engine.generate(row(prompt=prompt(40) % 61, max_tokens=30))

    expected = Oracle(tmp_path).logprobs(prompt(40) % 61, made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=1e-5)


async def test_without_a_tokenizer_stop_strings_are_refused_and_the_rest_is_served(
    tmp_path, models
):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(models["llama"] / name, tmp_path)
    async with running(tmp_path) as engine:
        assert len((await engine.generate(row())).tokens) == 8
        with pytest.raises(NotSupported, match=r"stop: .* without a tokenizer"):
            await engine.generate(row(stop_strings=("x",)))

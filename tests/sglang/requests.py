"""Requests and adapters for the tiny model of these tests."""

from __future__ import annotations

from contextlib import asynccontextmanager

import torch
from transformers import AutoConfig

from tinsmith_sampler.sglang.wire import Generate, Sampling

PROMPT = [5, 9, 33, 7]
RANK = 4


@asynccontextmanager
async def closing(one):
    """Closes a client or a server after the block."""
    try:
        yield one
    finally:
        await one.close()


def request(rid="r", *, prompt=PROMPT, adapter=None, seed=7, tokens=8, ask=(), **sampling):
    """A request; ``ask`` are further fields of its body."""
    return Generate(
        rid=rid,
        input_ids=list(prompt),
        lora_path=adapter,
        sampling_params=Sampling(sampling_seed=seed, max_new_tokens=tokens, **sampling),
        **dict(ask),
    )


def scoring(tokens, **named):
    """A request that draws nothing and scores all tokens but the first."""
    return request(prompt=tokens, tokens=0, ask={"logprob_start_len": 0}, **named)


def scores(answer):
    """Log-probabilities of the prompt's tokens but the first."""
    return [item[0] for item in answer.meta_info.input_token_logprobs[1:]]


def logprobs(answer):
    """Of the drawn tokens."""
    return [item[0] for item in answer.meta_info.output_token_logprobs]


def adapter(model, seed, *, layers=("q_proj", "k_proj", "v_proj"), depth=2, unembedding=False):
    """PEFT's configuration and tensors of a random adapter of the first ``depth`` blocks."""
    config = AutoConfig.from_pretrained(model)
    hidden = config.hidden_size
    widths = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    widths["v_proj"] = widths["k_proj"]
    shapes = {
        f"model.layers.{layer}.self_attn.{name}": (hidden, widths[name] * config.head_dim)
        for layer in range(depth)
        for name in layers
    }
    if unembedding:
        shapes["lm_head"] = (hidden, config.vocab_size)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in shapes.items():
        stem = f"base_model.model.{name}"
        tensors[f"{stem}.lora_A.weight"] = 0.3 * torch.randn(RANK, inputs, generator=random)
        tensors[f"{stem}.lora_B.weight"] = 0.3 * torch.randn(outputs, RANK, generator=random)
    targets = [*layers, *(["lm_head"] if unembedding else [])]
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    return {**told, "r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets}, tensors


def with_adapter(hf_model, config, tensors):
    """Adds an adapter to the weights of a Hugging Face model, in place; returns it."""
    weights = dict(hf_model.named_modules())
    scale = config["lora_alpha"] / config["r"]
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            layer = weights[stem.removeprefix("base_model.model.")]
            layer.weight.data += scale * tensors[f"{stem}.lora_B.weight"] @ down
    return hf_model


def true_scores(hf_model, tokens):
    """What ``scores`` should be."""
    with torch.no_grad():
        logits = hf_model(torch.tensor([tokens])).logits[0]
    rows = logits.log_softmax(-1)[:-1]
    return rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

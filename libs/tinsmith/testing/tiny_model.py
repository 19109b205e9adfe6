"""Tiny random models in Hugging Face format: folders that load like any real model, offline.

Two decoder layers of width 64 and a byte-level tokenizer, with every feature that a server has to
get right: grouped-query attention, tied (llama) or separate (qwen3) embeddings, a chat template,
a stop token; and what a family brings of its own: biases, experts, attention sinks, windows short
enough to matter, caps low enough to be felt. The weights depend on ``seed`` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "gemma",
    "gemma2",
    "gemma3_text",
]
"""The ``model_type`` of its configuration."""
FAMILIES: tuple[Family, ...] = get_args(Family)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2: padding, the start of a message, and its end (which is also EOS)."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SENTENCES = (
    "User: What is 4 + 5?\n\nAssistant: 9\n\n",
    "The quick brown fox jumps over the lazy dog.",
    "A tinsmith makes and repairs things of tin: kettles, lanterns, cake pans.",
    "system\nYou are a helpful assistant.\nuser\nHello! How are you today?\nassistant\nI am well.",
    "The sea is vast, and it is teeming with life in every corner of the globe.",
    "Once upon a time there was a small model that wanted to learn how to count: 1, 2, 3.",
)


def build(
    folder: Path,
    *,
    family: Family = "llama",
    seed: int = 0,
    vocab_size: int = 512,
    context_length: int = 2048,
) -> Path:
    """Write a model and its tokenizer into ``folder``, which is made if need be; returns it.

    ``vocab_size`` is an upper bound (at least 259: 256 bytes and the special tokens); the
    embedding has one row for each token that the tokenizer has. Weights are float32.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(vocab_size)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(family, len(tokenizer), context_length)
    model.save_pretrained(folder)
    return folder


def _model(family: Family, vocab_size: int, context_length: int) -> PreTrainedModel:
    from torch import nn
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        _config(family, vocab_size, context_length)
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):  # zero at first, which would hide their loss
            nn.init.normal_(parameter, std=0.1)
    return model


def _config(family: Family, vocab_size: int, context_length: int) -> PretrainedConfig:
    """``initializer_range`` is five times the usual: tiny logits would hide numeric faults."""
    from transformers import AutoConfig

    own = dict(_OWN[family])
    if family == "gpt_oss":
        own["rope_parameters"] = {**_YARN, "original_max_position_embeddings": context_length // 2}
    config: PretrainedConfig = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        max_position_embeddings=context_length,
        hidden_size=64,
        intermediate_size=64 if family == "gpt_oss" else 128,  # there it is that of an expert
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **own,
    )
    return config


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32, "beta_slow": 1}
_EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_OWN: dict[Family, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 64},
    "gpt_oss": {**_EXPERTS, **_WINDOWS, "num_local_experts": 4},
    "gemma": {},
    "gemma2": {
        **_WINDOWS,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 16},
}


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text has an encoding, and decoding gives it back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_SENTENCES, trainer)
    end_of_text, start, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=start,
        eos_token=end,
        pad_token=end_of_text,
        chat_template=CHAT_TEMPLATE,
    )

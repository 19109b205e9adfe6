"""Tiny random models in Hugging Face format: folders that load like any real model, offline.

Two decoder layers of width 64 and a byte-level tokenizer, with every feature that a server has to
get right: grouped-query attention, tied (llama) or separate (qwen3) embeddings, a chat template,
a stop token. The weights depend on ``seed`` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Family = Literal["llama", "qwen3"]

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
    """``initializer_range`` is five times the usual: tiny logits would hide numeric faults."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": context_length,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))


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

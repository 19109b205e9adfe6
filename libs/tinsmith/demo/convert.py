"""From a GGUF file of the llama family to a folder in Hugging Face format.

numpy only. The GGUF loader of transformers marks the model as quantised, so that it refuses to
train or save it, and drops the tokenizer's splitting of digits; here neither can happen.
Covers what SmolLM2 uses: a byte-level BPE tokenizer and tied embeddings, no rope scaling.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import GGUFReader
    from tokenizers import Tokenizer

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # gguf.TokenType.CONTROL


def convert(source: Path, out: Path) -> None:
    """Write weights (float32), configuration, tokenizer and chat template into ``out``."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    save_file(_weights(reader), out / "model.safetensors", metadata={"format": "pt"})
    _write(out / "config.json", _config(reader))
    _write(out / "generation_config.json", _token_ids(reader))
    _write(out / "tokenizer_config.json", _tokenizer_config(reader))
    _tokenizer(reader).save(str(out / "tokenizer.json"))


def rotary_by_halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The rows [out, in] of a query or key matrix in the order that transformers expects.

    llama.cpp pairs the two rows that rotary embedding turns together side by side within a head;
    transformers keeps the first of all pairs in the head's first half (convert_hf_to_gguf.py,
    ``LlamaModel.permute``, reversed).
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _weights(reader: GGUFReader) -> dict[str, np.ndarray[Any, Any]]:
    from gguf import dequantize

    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = tensor.name.split(".")[-2]
        if name in heads:
            values = rotary_by_halves(values, _value(reader, f"llama.attention.{heads[name]}"))
        weights[_renamed(tensor.name)] = np.ascontiguousarray(values)
    return weights


def _renamed(name: str) -> str:
    """``blk.7.attn_q.weight`` is ``model.layers.7.self_attn.q_proj.weight``."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_INNER[parts[2]]}.{parts[3]}"
    return f"{_OUTER[parts[0]]}.{parts[1]}"


def _config(reader: GGUFReader) -> dict[str, Any]:
    def llama(key: str) -> Any:  # noqa: ANN401 - the file decides
        return _value(reader, f"llama.{key}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": llama("vocab_size"),
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": llama("context_length"),
        # Stored as float32, but meant as the decimal number nearby.
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": llama("rope.freq_base"),
        "tie_word_embeddings": True,
        **_token_ids(reader),
    }


def _token_ids(reader: GGUFReader) -> dict[str, int]:
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: _value(reader, f"tokenizer.ggml.{name}_token_id") for key, name in ids.items()}


def _tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _value(reader, "llama.context_length"),
        "unk_token": tokens[_value(reader, "tokenizer.ggml.unknown_token_id")],
        "chat_template": _value(reader, "tokenizer.chat_template"),
        **{key.removesuffix("_id"): tokens[n] for key, n in _token_ids(reader).items()},
    }


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _value(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # The kind that llama.cpp calls "smollm": every digit is a token of its own.
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def _value(reader: GGUFReader, key: str) -> Any:  # noqa: ANN401 - the file decides
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"{key}: the GGUF file has no such field")
    return field.contents()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

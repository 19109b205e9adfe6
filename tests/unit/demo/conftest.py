"""A tiny llama as a GGUF file, written the way llama.cpp writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass
class Tiny:
    """The same model twice."""

    huggingface: Path
    gguf: Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    original = tiny_model.build(folder / "huggingface", family="llama")
    gguf = folder / "tiny.gguf"
    _write_gguf(original, gguf)
    return Tiny(original, gguf)


def _write_gguf(folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    for name, values in load_file(folder / "model.safetensors").items():
        writer.add_tensor(_renamed(name), _paired(name, values, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, content: dict) -> None:
    ids = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(tiny_model.CHAT_TEMPLATE)


def _renamed(name: str) -> str:
    if not name.startswith("model.layers."):
        return NAMES[name.removesuffix(".weight")] + ".weight"
    _, _, number, inner = name.split(".", 3)
    return f"blk.{number}.{NAMES[inner.removesuffix('.weight')]}.weight"


def _paired(name: str, values: np.ndarray, config: dict) -> np.ndarray:
    """llama.cpp's order: the two rows that rotary embedding turns together are neighbours."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if heads is None:
        return values
    out = np.empty_like(values)
    size = len(values) // heads
    for head in range(heads):
        rows = values[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = rows[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = rows[size // 2 :]
    return out

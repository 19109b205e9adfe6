"""SmolLM2-135M for benchmarks: the demo's model if it is in the cache, else random weights of its
shape. Speed and memory depend on the shape alone.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tinsmith import paths
from tinsmith.demo import model as demo_model

NAME = "bench/smollm2-135m"
VOCAB = 49_152


def folder():
    """The model's folder; and whether its weights are real."""
    cache = paths.cache_dir()
    real = demo_model.folder(cache)
    if real.is_dir():
        return real, True
    shaped = cache / "bench" / "smollm2-135m-shaped"
    if not shaped.is_dir():
        shaped.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=shaped.parent))
        _write(unfinished)
        shutil.move(unfinished, shaped)
    return shaped, False


def told(is_real):
    return "SmolLM2-135M float32" + ("" if is_real else ", random weights of its shape")


def _write(target):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(target)

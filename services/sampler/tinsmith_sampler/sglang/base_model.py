"""What the sampler itself knows of the model that an SGLang server computes, from its folder.

Weights are the server's; tokens, their ends and their text, and what an adapter may change, are
told by small files and by the headers of the large ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinsmith import model_files
from tinsmith_sampler.loading import decoder, load_tokenizer
from tinsmith_sampler.lora_layers import LayerShape
from tinsmith_sampler.sglang.routes import mixture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from tinsmith.model_files import ModelFiles
    from tinsmith_sampler.sglang.routes import Mixture
    from tinsmith_sampler.stopping import Decode

_LINEAR = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")) | {
    "lm_head"
}
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True, eq=False, slots=True)
class BaseModel:
    """A folder in Hugging Face format, read without its weights."""

    folder: Path
    vocab_size: int
    context_length: int  # of the model's own configuration
    eos_tokens: frozenset[int]
    to_text: Decode | None  # None: there is no tokenizer
    layers: Mapping[str, LayerShape]
    """What an adapter may change: linear layers, not experts, by the names that PEFT has."""
    mixture: Mixture | None = None  # None: there are no experts


def read(source: str) -> BaseModel:
    """What a folder or hub id holds; StartupError when it is no model that we know."""
    files = model_files.find(source)
    tokenizer = load_tokenizer(str(files.folder))
    return BaseModel(
        folder=files.folder,
        vocab_size=int(files.config["vocab_size"]),
        context_length=int(files.config["max_position_embeddings"]),
        eos_tokens=_eos_tokens(files, tokenizer),
        to_text=decoder(tokenizer),
        layers=_layers(files),
        mixture=mixture(files),
    )


def _eos_tokens(files: ModelFiles, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """As ``loading.eos_tokens`` has them of a loaded model."""
    generation = files.folder / "generation_config.json"
    told: Mapping[str, Any] = files.config
    if generation.is_file():
        told = json.loads(generation.read_bytes())
    configured = told.get("eos_token_id")
    of_model = [configured] if isinstance(configured, int) else configured or []
    of_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(of_model if of_tokenizer is None else [*of_model, of_tokenizer])


def _layers(files: ModelFiles) -> dict[str, LayerShape]:
    found: dict[str, LayerShape] = {}
    for name, shape in files.shapes.items():
        layer = name.removesuffix(".weight")
        leaf = layer.rpartition(".")[2]
        if len(shape) != 2 or layer == name or ".experts." in name:
            continue
        if leaf in _LINEAR:
            found[layer] = LayerShape(inputs=shape[1], outputs=shape[0])
        elif leaf == _EMBEDDING:  # tied: the head is not stored
            found.setdefault(_HEAD, LayerShape(inputs=shape[1], outputs=shape[0]))
    return found

"""``tinsmith export --merge``: an adapter's products added to the base's weights, as one model.

    W' = W + (alpha / r) B A        in float32, then rounded to the dtype of the base's files

An adapted unembedding gets a weight of its own if it shared the embedding's, which stays as it is.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tinsmith import model_files
from tinsmith_trainer import checkpoint_files, pretrained
from tinsmith_trainer.experts import factors_by_expert
from tinsmith_trainer.skeleton import targets_of
from tinsmith_trainer.whole_files import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from tinsmith.config import ModelConfig
    from tinsmith.model_files import ModelFiles
    from tinsmith_trainer.targets import Target

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
)


def main(files: Mapping[str, bytes], model: ModelConfig, folder: Path) -> None:
    """Write ``model`` with the adapter in ``files`` into ``folder``, in Hugging Face format.

    Raises:
        StartupError: the base cannot be loaded.
        InvalidRequest: the adapter is none of this base.
    """
    source = model_files.find(model.source)
    merged = merge(files, source, model.name)
    merged.save_pretrained(folder, max_shard_size=PIECE_BYTES)
    copy_tokenizer(model.source, folder)


def copy_tokenizer(source: str, folder: Path) -> None:
    """The tokenizer's files of a base model, byte for byte."""
    base = model_files.find(source).folder
    for name in sorted({file.name for glob in TOKENIZER_FILES for file in base.glob(glob)}):
        shutil.copyfile(base / name, folder / name)


@torch.no_grad()
def merge(files: Mapping[str, bytes], source: ModelFiles, name: str) -> PreTrainedModel:
    """The base in ``source``, called ``name``, with the adapter in ``files`` added.

    Raises as ``main``.
    """
    targets = targets_of(source)
    adapter = checkpoint_files.from_files(
        files, base_model=name, targets=targets, with_optimizer=False
    )
    model = pretrained.load(source, dtype_of(source), "none", torch.device("cpu"))
    if adapter.lora.train_unembed:
        _untie(model)
    parts = adapter.layout.named(adapter.weights)
    scale = adapter.lora.alpha / adapter.lora.rank
    for target in targets.of(adapter.lora):
        _add(model, target, parts[f"{target.name}.A"], parts[f"{target.name}.B"] * scale)
    if hasattr(model.config, "quantization_config"):  # it was undone
        del model.config.quantization_config
    return model


def dtype_of(source: ModelFiles) -> torch.dtype:
    """Of the base's weights, as its configuration names it; that of packed ones is bfloat16."""
    text = source.config.get("text_config", source.config)
    named = text.get("dtype") or text.get("torch_dtype") or "float32"
    if source.stored_form is not None:
        named = "bfloat16"
    found = getattr(torch, str(named), torch.float32)
    return found if isinstance(found, torch.dtype) else torch.float32


def _add(model: nn.Module, target: Target, A: Tensor, B: Tensor) -> None:
    if not target.experts:
        weight: Any = model.get_submodule(target.name).weight
        weight.copy_((weight.float() + B @ A).to(weight.dtype))
        return
    module: Any = model.get_submodule(target.name.rpartition(".")[0])
    W_EOI = getattr(module, target.leaf)
    if module.is_transposed:
        W_EOI = W_EOI.transpose(1, 2)
    for W_OI, A_RI, B_OR in zip(W_EOI, *factors_by_expert(A, B, target.experts), strict=True):
        W_OI.copy_((W_OI.float() + B_OR @ A_RI).to(W_OI.dtype))


def _untie(model: PreTrainedModel) -> None:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False

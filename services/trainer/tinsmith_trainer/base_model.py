"""The base model: found, loaded, frozen, and described.

torch and transformers are imported only once the files are known to be there, so that a wrong
path is reported at once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinsmith.errors import ConfigError, StartupError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

DTypeName = Literal["float32", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda"]

_HUB_ID_RE = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """What others need to know of the base model to make valid requests."""

    name: str
    vocab_size: int
    context_length: int  # tokens
    arch: str
    eos_tokens: tuple[int, ...]
    tokenizer_id: str


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A frozen causal language model on its device."""

    info: BaseModelInfo
    model: PreTrainedModel
    backbone: nn.Module  # everything but the unembedding
    unembedding: nn.Linear
    device: torch.device


def load(
    source: str,
    *,
    name: str,
    dtype: DTypeName = "float32",
    device: DeviceName = "auto",
    context_length: int | None = None,
    tokenizer_id: str | None = None,
) -> BaseModel:
    """Load ``source``, a folder in Hugging Face format or a hub id, to be served as ``name``.

    ``context_length`` may lower the model's own limit.

    Raises:
        StartupError: files are missing or damaged, there is no such device, or the
            architecture computes its logits in a way that the trainer does not reproduce.
    """
    check_files(source)
    import torch

    where = _device(device)
    model = _pretrained(source, getattr(torch, dtype), where)
    config = model.config.get_text_config()
    info = BaseModelInfo(
        name=name,
        vocab_size=config.vocab_size,
        context_length=_context_length(config.max_position_embeddings, context_length),
        arch=type(model).__name__,
        eos_tokens=_eos_tokens(model, config),
        tokenizer_id=tokenizer_id or name,
    )
    unembedding = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    base = BaseModel(info, model, model.base_model, unembedding, where)
    _check_logits(base)
    return base


def check_files(source: str) -> None:
    """Raises StartupError when ``source`` cannot be loaded as files are missing."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if _HUB_ID_RE.fullmatch(source):
            _check_hub_cache(source)
            return
        raise StartupError(
            f"model: there is no folder {source}; set path to a folder in Hugging Face format, "
            "or to a hub id"
        )
    missing = _missing_files(folder)
    if missing:
        raise StartupError(
            f"model: {source} lacks {', '.join(missing[:3])}; set path to a folder made by "
            "save_pretrained, with config.json and safetensors weights"
        )


def _missing_files(folder: Path) -> list[str]:
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return missing + [shard for shard in shards if not (folder / shard).is_file()]
    if not (folder / "model.safetensors").is_file():
        missing.append("model.safetensors")
    return missing


def _check_hub_cache(hub_id: str) -> None:
    """Offline, the cache is all there is; otherwise the hub client downloads what is missing."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE and not isinstance(
        try_to_load_from_cache(hub_id, "config.json"), str
    ):
        raise StartupError(
            f"model: {hub_id} is neither a folder nor in the hub cache {constants.HF_HUB_CACHE}, "
            "and HF_HUB_OFFLINE is set; set path to a folder, or unset it to download"
        )


def _device(name: DeviceName) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("device: torch finds no CUDA device; set device to cpu or auto")
    return torch.device(name)


def _pretrained(source: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The frozen model with every weight read from the files, none left at random."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError, RuntimeError) as exc:
        raise StartupError(f"model: {source} cannot be loaded: {exc}") from exc
    model, loading = loaded
    absent = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))
    if absent:
        raise StartupError(
            f"model: the weights in {source} lack {len(absent)} tensors of the architecture in "
            f"its config.json, such as {absent[0]}; get a complete copy"
        )
    frozen: PreTrainedModel = model.to(device).eval().requires_grad_(requires_grad=False)
    return frozen


def _context_length(limit: int, configured: int | None) -> int:
    if configured is not None and not 1 <= configured <= limit:
        raise ConfigError(
            f"context_length: {configured} is not from 1 to {limit}, the model's "
            "max_position_embeddings; lower it, or leave it out"
        )
    return configured or limit


def _eos_tokens(model: PreTrainedModel, config: PretrainedConfig) -> tuple[int, ...]:
    for source in (model.generation_config, config):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return (eos,) if isinstance(eos, int) else tuple(eos)
    return ()


def _check_logits(base: BaseModel) -> None:
    """Raises StartupError for architectures that scale or cap their logits after the unembedding.

    Training them as if they did not would be wrong without a sign of it.
    """
    import torch
    import torch.nn.functional as F

    ids = torch.arange(min(8, base.info.vocab_size), device=base.device)[None]
    with torch.inference_mode():
        expected = base.model(input_ids=ids, use_cache=False).logits.float()
        hidden = base.backbone(input_ids=ids, use_cache=False).last_hidden_state
        ours = F.linear(hidden, base.unembedding.weight, base.unembedding.bias).float()
    if not torch.allclose(ours, expected, rtol=1e-3, atol=1e-3):
        raise StartupError(
            f"model: {base.info.arch} does more to its logits than multiply by the unembedding, "
            "which the trainer does not reproduce; serve a model of the Llama or Qwen family"
        )

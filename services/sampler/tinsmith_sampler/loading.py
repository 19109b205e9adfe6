"""A Hugging Face folder as a model and a decoder, or one line that says why it cannot be served."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinsmith.errors import StartupError
from tinsmith_sampler import attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from tinsmith_sampler.stopping import Decode

_log = structlog.get_logger(__name__)


def load_model(path: str, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The frozen model, its attention ours; StartupError for one that would come out wrong."""
    attention.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention.NAME
        )
    except (OSError, ValueError) as problem:
        raise StartupError(f"model: {path!r} cannot be loaded: {problem}") from problem
    reason = _unsupported(model, model.config.get_text_config())
    if reason is not None:
        raise StartupError(
            f"model: {type(model).__name__} {reason}, which the torch engine lacks; "
            "serve it with SGLang"
        )
    model.requires_grad_(False)  # noqa: FBT003  torch's signature
    model.to(torch.device(device))  # type: ignore[arg-type]  # its decorator hides the signature
    model.eval()  # type: ignore[no-untyped-call]
    return cast("PreTrainedModel", model)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, or None if there is none; only stop strings need it."""
    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError) as problem:
        _log.warning("no_tokenizer", model=path, reason=str(problem))
        return None


def decoder(tokenizer: PreTrainedTokenizerBase | None) -> Decode | None:
    """Token ids to text, special tokens included."""
    return None if tokenizer is None else lambda ids: cast("str", tokenizer.decode(ids))


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """What ends a text: the model's EOS tokens and the tokenizer's."""
    generation = getattr(model, "generation_config", None)
    configured = None if generation is None else generation.eos_token_id
    of_model = [configured] if isinstance(configured, int) else configured or []
    of_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(of_model if of_tokenizer is None else [*of_model, of_tokenizer])


def _unsupported(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    """What this model has that the engine would compute wrongly."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if not getattr(model, "_supports_attention_backend", False):
        return "has an attention of its own"
    if kinds != {"full_attention"}:
        return f"has layers of kind {sorted(kinds - {'full_attention'})}"
    if rope in ("dynamic", "longrope"):
        return f"has {rope} rotary embeddings, which change with the longest row of a pass"
    return None

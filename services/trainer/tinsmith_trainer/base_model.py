"""The base model: found, loaded, frozen, and described.

torch and transformers are imported only once the files are known to be there, so that a wrong
path is reported at once.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tinsmith import memory, model_files, whole
from tinsmith.errors import ConfigError, StartupError
from tinsmith_trainer import pretrained

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from tinsmith.model_files import ModelFiles, Quantization

DTypeName = Literal["float32", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda"]


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
    softcap: float | None = None
    """Logits z are softcap * tanh(z / softcap), as in the Gemma family; None: they are not."""
    gathered_output: Callable[[], AbstractContextManager[None]] = nullcontext
    """The unembedding has its whole weight in the block, wherever that is in shards."""


def load(  # noqa: PLR0913 - what the configuration says of one model
    source: str,
    *,
    name: str,
    dtype: DTypeName = "float32",
    quantization: Quantization = "none",
    device: DeviceName = "auto",
    context_length: int | None = None,
    tokenizer_id: str | None = None,
    pass_tokens: int = 0,
    shards: int = 1,
) -> BaseModel:
    """Load ``source``, a folder in Hugging Face format or a hub id, to be served as ``name``.

    ``quantization`` holds the linear layers in 4 or 8 bits, for all adapters together; they
    compute in ``dtype``. ``context_length`` may lower the model's own limit. There must be room
    for the weights and for a pass over ``pass_tokens``. With ``shards`` the device will have one of
    so many: of the weights, which are all on the host then, to be taken apart; or, of a model that
    is trained whole, of its training state.

    Raises:
        StartupError: files are missing or damaged, the architecture is unknown, there is no such
            device or too little memory on it, or the logits are made in a way that the trainer
            does not reproduce.
    """
    files = model_files.find(source)
    import torch

    where = find_device(device)
    model_files.check_quantization(files, quantization, device=where.type)
    if shards > 1 and not whole.is_whole(name):
        _check_room_of_shard(files, name, dtype, where, pass_tokens, shards)
        where = torch.device("cpu")
    else:
        _check_room(files, name, dtype, quantization, where, pass_tokens, shards)
    model = pretrained.load(files, getattr(torch, dtype), quantization, where)
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
    softcap = getattr(config, "final_logit_softcapping", None)
    base = BaseModel(info, model, model.base_model, unembedding, where, softcap)
    _check_logits(base)
    return base


def find_device(name: DeviceName) -> torch.device:
    """The device of that name; StartupError when there is none."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("device: torch finds no CUDA device; set device to cpu or auto")
    return torch.device(name)


def _check_room(
    files: ModelFiles,
    name: str,
    dtype: DTypeName,
    quantization: Quantization,
    device: torch.device,
    pass_tokens: int,
    shards: int,
) -> None:
    import torch

    form = dtype if quantization == "none" else f"{quantization} and {dtype}"
    needs = {
        f"for weights in {form}": files.weight_bytes(dtype, quantization),
        f"for passes of {pass_tokens} tokens": pass_tokens * _bytes_per_token(files, dtype),
    }
    is_whole = whole.is_whole(name)
    can_quantise = quantization != "nf4" and files.stored_form is None and not is_whole
    if is_whole:
        needs["for training all weights in float32"] = files.state_bytes(shards)
    if is_whole and shards > 1:
        output = _output_bytes(files, dtype)
        needs["for the gradient of a pass"] = files.weight_bytes(dtype) + output
        if device.type == "cpu":
            needs["for weights as they were loaded"] = files.weight_bytes(dtype)
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else memory.available_bytes()
    remedies = [
        'set dtype to "bfloat16"' if dtype == "float32" else "",
        'set quantization to "nf4"' if can_quantise else "",
        'set trainer.sharding to "weights", with several ranks' if is_whole and shards == 1 else "",
        "use more ranks" if shards > 1 else "",
        "take full = true out of its [[models]] entry" if is_whole else "",
        "lower microbatch_tokens" if pass_tokens else "",
        "or serve a smaller model",
    ]
    remedy = ", ".join(filter(None, remedies)).removeprefix("or ")
    memory.check_room(name, needs, free, place=str(device), remedy=remedy)
    if quantization != "none" and files.has_experts:  # see ``quantising``
        needs = {f"for weights in {dtype}, before they are quantised": files.weight_bytes(dtype)}
        host = memory.available_bytes()
        memory.check_room(name, needs, host, place="the host", remedy="serve a smaller model")


def _check_room_of_shard(
    files: ModelFiles,
    name: str,
    dtype: DTypeName,
    device: torch.device,
    pass_tokens: int,
    shards: int,
) -> None:
    import torch

    weights = files.weight_bytes(dtype)
    needs = {f"for weights in {dtype}, until they are shards": weights}
    host = memory.available_bytes()
    memory.check_room(name, needs, host, place="the host", remedy="serve a smaller model")
    if device.type == "cuda":
        needs = {
            f"for one of {shards} shards of weights in {dtype}": weights // shards,
            f"for passes of {pass_tokens} tokens": pass_tokens * _bytes_per_token(files, dtype),
        }
        remedy = "use more ranks, lower microbatch_tokens, or serve a smaller model"
        free = torch.cuda.mem_get_info(device)[0]
        memory.check_room(name, needs, free, place=str(device), remedy=remedy)


def _output_bytes(files: ModelFiles, dtype: DTypeName) -> int:
    """By how much the gradient of the output layer, in float32, is larger than in ``dtype``."""
    numbers = files.config.get("vocab_size", 0) * files.config.get("hidden_size", 0)
    return int(0 if dtype == "float32" else 2 * numbers)


def _bytes_per_token(files: ModelFiles, dtype: DTypeName) -> int:
    """What a layer keeps of a token for the backward pass, in all layers: an estimate.

    Twelve vectors of the hidden width (norms, projections, residuals) and four of the MLP's.
    """
    config = files.config
    inner = config.get("intermediate_size") or 0
    if files.has_experts:
        inner = config.get("moe_intermediate_size", inner) * config.get("num_experts_per_tok", 1)
    floats = 12 * config.get("hidden_size", 0) + 4 * inner
    return int(config.get("num_hidden_layers", 0) * floats * (4 if dtype == "float32" else 2))


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
    """Raises StartupError for architectures that change their logits in other ways than a cap.

    Training them as if they did not would be wrong without a sign of it.
    """
    import torch
    import torch.nn.functional as F

    ids = torch.arange(min(8, base.info.vocab_size), device=base.device)[None]
    with torch.inference_mode():
        expected = base.model(input_ids=ids, use_cache=False).logits.float()
        hidden = base.backbone(input_ids=ids, use_cache=False).last_hidden_state
        ours = F.linear(hidden, base.unembedding.weight, base.unembedding.bias).float()
        if base.softcap is not None:
            ours = base.softcap * torch.tanh(ours / base.softcap)
    # Caps and scales change logits by far more than bfloat16 rounds.
    if not torch.allclose(ours, expected, rtol=2e-2, atol=2e-2):
        raise StartupError(
            f"model: {base.info.arch} does more to its logits than multiply by the unembedding "
            "and cap them, which the trainer does not reproduce; serve another model"
        )

"""Adapters as files: PEFT's own format, and beside it what training needs to go on.

    adapter_model.safetensors   the factors, float32, under PEFT's names
    adapter_config.json         PEFT's LoraConfig
    optimizer.safetensors       AdamW's moments
    trainer_state.json          the adapter's shape and the count of steps

Equal states give equal bytes. Nothing is ever pickled or unpickled. An adapter that PEFT wrote
elsewhere is read too, if it adapts whole groups of matrices as ours do.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

import msgspec
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import LoraShape
from tinsmith_trainer.adapters import Layout, Snapshot
from tinsmith_trainer.lora import check_shape
from tinsmith_trainer.optim import AdamState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tinsmith_trainer.lora import Target, Targets

S = TypeVar("S")

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"

_FORMAT = 1
_PEFT_PREFIX = "base_model.model."


class _TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """``trainer_state.json``: no field has a default, so that none is ever left out."""

    format: int
    base_model: str
    steps: int
    rank: int
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


class _PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``adapter_config.json`` that decide what an adapter computes."""

    peft_type: str
    r: int
    lora_alpha: float
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}


def to_files(snapshot: Snapshot, *, with_optimizer: bool) -> dict[str, bytes]:
    """The files of a checkpoint by name, with or without what training needs to go on."""
    files = {
        WEIGHTS: _pack(_peft_names(snapshot.layout, snapshot.weights)),
        CONFIG: _json(_peft_config(snapshot)),
    }
    if with_optimizer:
        state = snapshot.optimizer
        files[OPTIMIZER] = _pack(
            _moment_names(snapshot.layout, "exp_avg", state.exp_avg)
            | _moment_names(snapshot.layout, "exp_avg_sq", state.exp_avg_sq)
        )
        files[STATE] = _json(
            {
                "format": _FORMAT,
                "base_model": snapshot.base_model,
                "steps": state.steps,
                **msgspec.structs.asdict(snapshot.lora),
            }
        )
    return files


def from_files(
    files: Mapping[str, bytes], *, base_model: str, targets: Targets, with_optimizer: bool
) -> Snapshot:
    """What ``files`` hold, checked against the base model that is to carry it.

    Without ``with_optimizer`` the moments are zero and no steps are counted.

    Raises:
        InvalidRequest: a file is missing, damaged, or made for another base or adapter shape.
    """
    tensors = _unpack(files, WEIGHTS)
    lora = _shape(files, base_model, tensors, targets)
    layout = Layout(targets.of(lora), lora.rank)
    weights = torch.zeros(layout.size)
    _fill(_peft_names(layout, weights), tensors, WEIGHTS)
    optimizer = AdamState.like(weights)
    if with_optimizer:
        optimizer.steps = _read_state(files).steps
        names = _moment_names(layout, "exp_avg", optimizer.exp_avg)
        names |= _moment_names(layout, "exp_avg_sq", optimizer.exp_avg_sq)
        _fill(names, _unpack(files, OPTIMIZER), OPTIMIZER)
    return Snapshot(base_model, lora, layout, weights, optimizer)


def _peft_names(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    names = {}
    for name, (A_RI, B_OR) in layout.views(flat).items():
        names[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = A_RI
        names[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = B_OR
    return names


def _moment_names(layout: Layout, moment: str, flat: Tensor) -> dict[str, Tensor]:
    return {f"{moment}.{name}": view for name, view in _peft_names(layout, flat).items()}


def _peft_config(snapshot: Snapshot) -> dict[str, object]:
    """PEFT fills in what is left out; this much other engines read as well."""
    lora = snapshot.lora
    return {
        "base_model_name_or_path": snapshot.base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": snapshot.layout.module_names,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _shape(
    files: Mapping[str, bytes], base_model: str, tensors: Mapping[str, Tensor], targets: Targets
) -> LoraShape:
    """The shape that the files agree on."""
    config = _decode(files, CONFIG, _PeftConfig)
    _check_plain(config)

    def holds(group: tuple[Target, ...]) -> bool:
        return any(f"{_PEFT_PREFIX}{target.name}.lora_A.weight" in tensors for target in group)

    lora = LoraShape(
        rank=config.r,
        alpha=config.lora_alpha,
        train_attn=holds(targets.attn),
        train_mlp=holds(targets.mlp),
        train_unembed=holds((targets.unembed,)),
    )
    if STATE in files:
        state = _read_state(files)
        _check_base(state.base_model, base_model)
        lora = msgspec.structs.replace(lora, seed=state.seed)
        _check_agreement(state, lora)
    check_shape(lora)
    return lora


def _check_plain(config: _PeftConfig) -> None:
    """Variants of LoRA would load without complaint and compute something else."""
    plain = _PeftConfig(peft_type="LORA", r=config.r, lora_alpha=config.lora_alpha)
    for field in _PeftConfig.__struct_fields__:
        value = getattr(config, field)
        if value != getattr(plain, field):
            raise InvalidRequest(
                f"{CONFIG}: {field} is {value!r}, which this server does not support; "
                f"use an adapter with {field} {getattr(plain, field)!r}"
            )


def _check_base(theirs: str, ours: str) -> None:
    if theirs != ours:
        raise InvalidRequest(
            f"{STATE}: the checkpoint was trained on {theirs}, this model is on {ours}; "
            "load it into a model on the same base"
        )


def _check_agreement(state: _TrainerState, lora: LoraShape) -> None:
    for field, value in msgspec.structs.asdict(lora).items():
        if getattr(state, field) != value:
            raise InvalidRequest(
                f"{STATE}: {field} is {getattr(state, field)!r}, but the adapter's own files say "
                f"{value!r}; the files are not of one checkpoint"
            )


def _read_state(files: Mapping[str, bytes]) -> _TrainerState:
    state = _decode(files, STATE, _TrainerState)
    if state.format != _FORMAT:
        raise InvalidRequest(
            f"{STATE}: format is {state.format}, this server reads {_FORMAT}; use the version of "
            "Tinsmith that wrote it"
        )
    return state


def _fill(names: Mapping[str, Tensor], tensors: Mapping[str, Tensor], file: str) -> None:
    """Copy ``tensors`` into the views called as they are; each must fit and none be left."""
    if names.keys() != tensors.keys():
        odd = min(names.keys() ^ tensors.keys())
        raise InvalidRequest(
            f"{file}: tensor {odd} is {'missing' if odd in names else 'not expected'}; the "
            "adapter does not fit this base model, or adapts only some of its matrices"
        )
    for name, view in names.items():
        tensor = tensors[name]
        if tensor.shape != view.shape or not tensor.is_floating_point():
            raise InvalidRequest(
                f"{file}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, not floats of "
                f"shape {list(view.shape)}; the adapter does not fit this base model"
            )
        view.copy_(tensor)
        if not torch.isfinite(view).all():
            raise InvalidRequest(f"{file}: {name} holds numbers that are not finite")


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return safetensors.numpy.save(arrays, {"format": "pt"})


def _unpack(files: Mapping[str, bytes], name: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(_file(files, name))
    except SafetensorError as exc:
        raise InvalidRequest(f"{name}: not a valid safetensors file: {exc}") from exc


def _decode(files: Mapping[str, bytes], name: str, type_: type[S]) -> S:
    try:
        return msgspec.json.decode(_file(files, name), type=type_)
    except msgspec.MsgspecError as exc:
        raise InvalidRequest(f"{name}: {exc}") from exc


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        remedy = (
            "load it without the optimizer, or use a checkpoint made by save_state"
            if name in {OPTIMIZER, STATE}
            else "an adapter is read from safetensors and JSON files only"
        )
        raise InvalidRequest(f"{name}: the checkpoint does not have it; {remedy}")
    return files[name]


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()

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
from blake3 import blake3
from safetensors import SafetensorError

from tinsmith.errors import InvalidRequest
from tinsmith.messages.base import BlobRef
from tinsmith.messages.ops import LoraShape
from tinsmith_trainer import peft_format
from tinsmith_trainer.adapters import Layout, Snapshot
from tinsmith_trainer.lora import check_shape
from tinsmith_trainer.optim import AdamState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tinsmith_trainer.targets import Target, Targets

S = TypeVar("S")

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"

_FORMAT = 1


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


def to_files(snapshot: Snapshot, *, with_optimizer: bool) -> dict[str, bytes]:
    """The files of a checkpoint by name, with or without what training needs to go on."""
    files = {
        WEIGHTS: _pack(_peft_names(snapshot.layout, snapshot.weights)),
        CONFIG: _json(
            peft_format.config(snapshot.base_model, snapshot.lora, snapshot.layout.targets)
        ),
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


def refs(files: Mapping[str, bytes]) -> dict[str, BlobRef]:
    """What ``files`` are called in the blob store, whether they are there or not."""
    return {name: BlobRef(blake3(data).hexdigest(), len(data)) for name, data in files.items()}


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
    views = layout.views(flat)
    for target in layout.targets:
        name_A, name_B = peft_format.tensor_names(target)
        names[name_A], names[name_B] = views[target.name]
    return names


def _moment_names(layout: Layout, moment: str, flat: Tensor) -> dict[str, Tensor]:
    return {f"{moment}.{name}": view for name, view in _peft_names(layout, flat).items()}


def _shape(
    files: Mapping[str, bytes], base_model: str, tensors: Mapping[str, Tensor], targets: Targets
) -> LoraShape:
    """The shape that the files agree on."""
    config = _decode(files, CONFIG, peft_format.PeftConfig)
    peft_format.check_plain(config, CONFIG)

    def holds(group: tuple[Target, ...]) -> bool:
        return any(peft_format.tensor_names(target)[0] in tensors for target in group)

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

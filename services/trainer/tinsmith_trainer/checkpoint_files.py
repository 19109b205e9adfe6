"""Adapters as files: PEFT's own format, and beside it what training needs to go on.

    adapter_model.safetensors   the factors, float32, under PEFT's names
    adapter_config.json         PEFT's LoraConfig

and of a training checkpoint also the files of ``training_files``. Equal states give equal bytes.
An adapter that PEFT wrote elsewhere is read too, if it adapts whole groups of matrices as ours do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
from blake3 import blake3

from tinsmith.errors import InvalidRequest
from tinsmith.messages.base import BlobRef
from tinsmith.messages.ops import LoraShape
from tinsmith_trainer import peft_format, whole_files
from tinsmith_trainer.adapters import LoraLayout
from tinsmith_trainer.lora import check_shape
from tinsmith_trainer.optim import Moments
from tinsmith_trainer.tensor_files import as_json, decode, fill, pack, unpack
from tinsmith_trainer.trainable import Snapshot
from tinsmith_trainer.training_files import (
    NO_OPTIMIZER,
    OPTIMIZER,
    STATE,
    TrainerState,
    check_base,
    moment_tensors,
    read_state,
    state_file,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tinsmith.messages.ops import OptimizerFamily
    from tinsmith_trainer.targets import Target, Targets

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_PLAIN = "an adapter is read from safetensors and JSON files only"
_WHOSE = "the adapter"


def to_files(snapshot: Snapshot, *, with_optimizer: bool) -> Mapping[str, bytes]:
    """The files of a checkpoint by name, with or without what training needs to go on.

    Those of a whole model are made one by one, when they are asked for.
    """
    layout = snapshot.layout
    if not isinstance(layout, LoraLayout):
        return whole_files.WholeFiles(snapshot, with_optimizer=with_optimizer)
    names = _peft_names(layout)
    weights = layout.named(snapshot.weights)
    files = {
        WEIGHTS: pack({names[part]: weights[part] for part in weights}),
        CONFIG: as_json(peft_format.config(snapshot.base_model, snapshot.lora, layout.targets)),
    }
    if with_optimizer:
        files[OPTIMIZER] = pack(moment_tensors(layout, snapshot.optimizer, names))
        files[STATE] = state_file(snapshot)
    return files


def refs(files: Mapping[str, bytes]) -> dict[str, BlobRef]:
    """What ``files`` are called in the blob store, whether they are there or not."""
    return {name: BlobRef(blake3(data).hexdigest(), len(data)) for name, data in files.items()}


def from_files(
    files: Mapping[str, bytes],
    *,
    base_model: str,
    targets: Targets,
    with_optimizer: bool,
    optimizer: OptimizerFamily = "adamw",
) -> Snapshot:
    """What ``files`` hold, checked against the base model that is to carry it.

    Without ``with_optimizer`` the moments are zero and no steps are counted: a fresh ``optimizer``.

    Raises:
        InvalidRequest: a file is missing, damaged, or made for another base or adapter shape.
    """
    tensors = unpack(files, WEIGHTS, _PLAIN)
    lora = _shape(files, base_model, tensors, targets)
    layout = LoraLayout(targets.of(lora), lora.rank)
    names = _peft_names(layout)
    weights = torch.zeros(layout.size)
    views = layout.named(weights)
    fill({names[part]: views[part] for part in views}, tensors, WEIGHTS, _WHOSE)
    if not with_optimizer:
        return Snapshot(
            base_model, lora, layout, weights, Moments.fresh(optimizer, weights, layout)
        )
    state = read_state(files)
    moments = Moments.fresh(state.optimizer, weights, layout)
    moments.steps = state.steps
    read = unpack(files, OPTIMIZER, NO_OPTIMIZER)
    fill(moment_tensors(layout, moments, names), read, OPTIMIZER, _WHOSE)
    return Snapshot(base_model, lora, layout, weights, moments)


def _peft_names(layout: LoraLayout) -> dict[str, str]:
    """What files call each part of the layout."""
    names: dict[str, str] = {}
    for target in layout.targets:
        name_A, name_B = peft_format.tensor_names(target)
        names |= {f"{target.name}.A": name_A, f"{target.name}.B": name_B}
    return names


def _shape(
    files: Mapping[str, bytes], base_model: str, tensors: Mapping[str, Tensor], targets: Targets
) -> LoraShape:
    """The shape that the files agree on."""
    config = decode(files, CONFIG, peft_format.PeftConfig, _PLAIN)
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
        state = read_state(files)
        check_base(state, base_model)
        lora = msgspec.structs.replace(lora, seed=state.seed)
        _check_agreement(state, lora)
    check_shape(lora)
    return lora


def _check_agreement(state: TrainerState, lora: LoraShape) -> None:
    for field, value in msgspec.structs.asdict(lora).items():
        if getattr(state, field) != value:
            raise InvalidRequest(
                f"{STATE}: {field} is {getattr(state, field)!r}, but the adapter's own files say "
                f"{value!r}; the files are not of one checkpoint"
            )

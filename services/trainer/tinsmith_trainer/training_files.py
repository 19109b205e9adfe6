"""What a checkpoint holds beside its weights so that training can go on.

    optimizer.safetensors    the moments, by the names of the weights they belong to
    trainer_state.json       the tenant's shape, the optimizer and the count of steps

A large optimizer comes as several files, ``optimizer-00001-of-00003.safetensors`` and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import LoraShape, OptimizerFamily
from tinsmith_trainer.tensor_files import as_json, decode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tinsmith_trainer.layout import Layout
    from tinsmith_trainer.optim import Moments
    from tinsmith_trainer.trainable import Snapshot

OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"

NO_OPTIMIZER = "load it without the optimizer, or use a checkpoint made by save_state"

_FORMATS: dict[str, int] = {"adamw": 1, "dimuon": 2}
"""A state of AdamW is written as it was before there was another."""


class _Format(msgspec.Struct, frozen=True):
    format: int
    optimizer: str = "adamw"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """``trainer_state.json``; fields without a default are in every one of them."""

    format: int
    base_model: str
    steps: Annotated[int, Meta(ge=0, le=2**53)]
    rank: int
    alpha: float
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # what a digest has room for
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: OptimizerFamily = "adamw"
    root: str = ""
    """By which its tensors are proven, where they are chunks (``saved_states``)."""

    @property
    def lora(self) -> LoraShape:
        """The tenant's shape."""
        return LoraShape(**{name: getattr(self, name) for name in LoraShape.__struct_fields__})


def state_file(snapshot: Snapshot, *, root: str = "") -> bytes:
    """``trainer_state.json`` of a snapshot."""
    family = snapshot.optimizer.family
    fields: dict[str, object] = {
        "format": _FORMATS[family],
        "base_model": snapshot.base_model,
        "steps": snapshot.optimizer.steps,
        **msgspec.structs.asdict(snapshot.lora),
    }
    if family != "adamw":
        fields["optimizer"] = family
    if root:
        fields["root"] = root
    return as_json(fields)


def read_state(files: Mapping[str, bytes]) -> TrainerState:
    """``trainer_state.json`` of ``files``; InvalidRequest when it is of no version known here."""
    # The number first: another format may have other fields.
    found = decode(files, STATE, _Format, NO_OPTIMIZER)
    if found.format == _FORMATS.get(found.optimizer):
        return decode(files, STATE, TrainerState, NO_OPTIMIZER)
    known = ", ".join(f"{number} of {family}" for family, number in _FORMATS.items())
    raise InvalidRequest(
        f"{STATE}: format is {found.format} of {found.optimizer[:80]}, this server reads {known}; "
        "use the version of Tinsmith that wrote it"
    )


def check_base(state: TrainerState, base_model: str) -> None:
    """Raises InvalidRequest for a state that was trained on another base."""
    if state.base_model != base_model:
        raise InvalidRequest(
            f"{STATE}: the checkpoint was trained on {state.base_model}, this model is on "
            f"{base_model}; load it into a model on the same base"
        )


def moment_tensors(layout: Layout, moments: Moments, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Views of both moments by what files call them; ``names`` are those of the weights there."""
    second = layout if moments.family == "adamw" else layout.rest()
    return {
        f"{moment}.{names[part]}": view
        for moment, views in (
            ("exp_avg", layout.named(moments.exp_avg)),
            ("exp_avg_sq", second.named(moments.exp_avg_sq)),
        )
        for part, view in views.items()
    }

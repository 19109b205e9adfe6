"""PEFT's names and configuration for an adapter of ours.

A linear layer's factors are called after it. The two parameters of a module of experts are
adapted by wrappers around the module, one inside the other: the inner one, of ``gate_up_proj``,
is the outer one's ``base_layer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tinsmith.errors import InvalidRequest
from tinsmith_trainer import experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.messages.ops import LoraShape
    from tinsmith_trainer.targets import Target

_PREFIX = "base_model.model."


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
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


def tensor_names(target: Target) -> tuple[str, str]:
    """What PEFT calls A and B of this matrix in ``adapter_model.safetensors``."""
    name = target.name
    if target.experts:
        name = name.removesuffix(f".{target.leaf}")
        if target.leaf == experts.GATE_UP:
            name += ".base_layer"
    return f"{_PREFIX}{name}.lora_A.weight", f"{_PREFIX}{name}.lora_B.weight"


def config(base_model: str, lora: LoraShape, targets: Sequence[Target]) -> dict[str, object]:
    """``adapter_config.json``. PEFT fills in what is left out; this much other engines read."""
    fields: dict[str, object] = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted({target.leaf for target in targets if not target.experts}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    parameters = {_in_its_layer(target.name) for target in targets if target.experts}
    return fields | ({"target_parameters": sorted(parameters)} if parameters else {})


def check_plain(config: PeftConfig, file: str) -> None:
    """Variants of LoRA would load without complaint and compute something else."""
    plain = PeftConfig(peft_type="LORA", r=config.r, lora_alpha=config.lora_alpha)
    for field in PeftConfig.__struct_fields__:
        value = getattr(config, field)
        if value != getattr(plain, field):
            raise InvalidRequest(
                f"{file}: {field} is {value!r}, which this server does not support; "
                f"use an adapter with {field} {getattr(plain, field)!r}"
            )


def _in_its_layer(name: str) -> str:
    """``mlp.experts.down_proj`` of ``model.layers.0.mlp.experts.down_proj``."""
    return ".".join(name.split(".")[-3:])

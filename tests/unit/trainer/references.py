"""PEFT's own model with an adapter of the engine's, and what it computes for a datum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import peft
import torch
from tests.unit.trainer.examples import values
from transformers import AutoModelForCausalLM

from tinsmith_trainer import peft_format
from tinsmith_trainer.checkpoint_files import to_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from tinsmith.messages.ops import Datum
    from tinsmith_trainer.engine import TrainingEngine


def peft_model(base: nn.Module | Path, engine: TrainingEngine, folder: Path) -> nn.Module:
    """``base`` under the adapter of model "m", through the files of a checkpoint in ``folder``."""
    if not isinstance(base, torch.nn.Module):
        base = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    folder.mkdir(exist_ok=True)
    for name, data in to_files(engine.snapshot("m"), with_optimizer=False).items():
        (folder / name).write_bytes(data)
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)


def logprobs_of(model: nn.Module, datum: Datum) -> Tensor:
    """Of the targets, from the model's own logits: float32 [N]."""
    tokens = torch.tensor(values(datum.tokens), dtype=torch.int64)
    targets = torch.tensor(values(datum.inputs["target_tokens"]))
    lp = model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
    return lp.gather(1, targets[:, None]).squeeze(1)


def cross_entropy_of(model: nn.Module, data: Sequence[Datum]) -> Tensor:
    """The loss that the server calls ``loss:sum``."""
    weights = (torch.tensor(values(datum.inputs["weights"])) for datum in data)
    return -sum((w * logprobs_of(model, d)).sum() for w, d in zip(weights, data, strict=True))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the names that PEFT saves the factors under."""
    return {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradients(engine: TrainingEngine) -> dict[str, Tensor]:
    """What the engine has accumulated for model "m", by the same names."""
    adapter = engine._adapters.get("m")
    views = adapter.layout.views(adapter.gradient)
    return {
        name: part
        for target in adapter.layout.targets
        for name, part in zip(peft_format.tensor_names(target), views[target.name], strict=True)
    }


def scatter(engine: TrainingEngine, size: float = 0.1) -> None:
    """Random factors for model "m": a B of zero would hide most of what can be wrong."""
    weights = engine._adapters.get("m").weights
    with torch.no_grad():
        drawn = torch.empty(weights.shape).normal_(
            0, size, generator=torch.Generator().manual_seed(1)
        )
        weights.copy_(drawn)  # on whatever device they are

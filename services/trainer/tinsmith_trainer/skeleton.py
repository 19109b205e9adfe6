"""What can be adapted in a base model, told from its configuration alone: no weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tinsmith_trainer.lora import ActiveAdapter
from tinsmith_trainer.targets import inject

if TYPE_CHECKING:
    from tinsmith.model_files import ModelFiles
    from tinsmith_trainer.targets import Targets


def targets_of(files: ModelFiles) -> Targets:
    """As ``inject`` finds them; raises as that."""
    config: Any = AutoConfig.from_pretrained(str(files.folder))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return inject(model, ActiveAdapter())

"""What the trainer trains is what the sampler serves: equal log-probabilities, in every family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.parity.agreement import require_same_logprobs
from tests.unit.trainer import references

from tinsmith.messages.ops import LoraShape
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from pathlib import Path

FORMS = [
    *((family, "none", "float32", 1e-5) for family in tiny_model.FAMILIES),
    ("llama", "nf4", "float32", 1e-5),
    ("qwen3", "int8", "float32", 1e-5),
    ("qwen3_moe", "nf4", "float32", 1e-5),
    ("gpt_oss", "int8", "float32", 1e-5),
    ("llama", "none", "bfloat16", 0.1),
    ("qwen3_moe", "none", "bfloat16", 0.3),
]
"""Family, quantisation, dtype, and how far log-probabilities may differ. In bfloat16 that is what
two ways to order the same sums make of eight bits; a mixture may send a token elsewhere."""


@pytest.mark.parametrize(("family", "quantization", "dtype", "close"), FORMS)
async def test_the_sampler_gives_the_trainers_logprobs(
    tmp_path: Path, family: str, quantization: str, dtype: str, close: float
):
    folder = tiny_model.build(tmp_path, family=family)
    form = {"dtype": dtype, "quantization": quantization}
    trainer = TrainingEngine(base_model.load(str(folder), name="tiny", **form))
    trainer.create("m", LoraShape(rank=8))
    references.scatter(trainer, 0.05)
    await require_same_logprobs(trainer, folder, form, close=close)

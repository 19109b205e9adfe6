"""What the trainer trains is what the sampler serves: equal log-probabilities, in every family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.unit.sampler.engines import running
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.trainer import references
from tests.unit.trainer.examples import cross_entropy, datum, logprobs

from tinsmith.messages.ops import LoraShape
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from pathlib import Path

FORMS = [
    *((family, "none", "float32", 1e-5) for family in tiny_model.FAMILIES),
    ("llama", "nf4", "float32", 1e-5),
    ("qwen3", "int8", "float32", 1e-5),
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
    files = to_files(trainer.snapshot("m"), with_optimizer=False)
    async with running(folder, **form) as sampler:
        await sampler.load_adapter("a", files)
        made = await sampler.generate(row(prompt=prompt(40), max_tokens=20, adapter="a"))
        text = np.concatenate([prompt(40), made.tokens])
        scored = await sampler.score(scoring(text, adapter="a"))

    op = cross_entropy(datum(text[:-1], text[1:]), forward_only=True)
    (trained,) = logprobs(trainer.forward_backward("m", op))

    np.testing.assert_allclose(made.logprobs, trained[39:], rtol=0, atol=close)
    np.testing.assert_allclose(scored.logprobs[1:], trained, rtol=0, atol=close)

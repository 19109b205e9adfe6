"""What the trainer trains is what the SGLang engine serves: equal log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sglang.engines import EXACT
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.trainer.examples import cross_entropy, datum, logprobs, random_datum

from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

PROMPT = prompt(40)
TEMPERATURES = (0.0, 0.5, 1.0, 1.7)
SHAPES = {
    "rank 8": LoraShape(rank=8),
    "rank 1, alpha 16": LoraShape(rank=1, alpha=16.0),
    "attention": LoraShape(rank=16, train_mlp=False, train_unembed=False),
    "unembedding": LoraShape(rank=4, train_attn=False, train_mlp=False),
}


@pytest.fixture(scope="module", params=SHAPES)
def trainer(request, model):
    made = TrainingEngine(base_model.load(str(model), name="tiny"))
    made.create("m", SHAPES[request.param])
    return made


async def require_same(engine, trainer, adapter):
    """Log-probabilities drawn at any temperature, and scored, are the trainer's."""
    for temperature in TEMPERATURES:
        asked = row(prompt=PROMPT, max_tokens=20, adapter=adapter, temperature=temperature, seed=3)
        made = await engine.generate(asked)
        text = np.concatenate([PROMPT, made.tokens])
        scored = await engine.score(scoring(text, adapter=adapter))
        op = cross_entropy(datum(text[:-1], text[1:]), forward_only=True)
        (trained,) = logprobs(trainer.forward_backward("m", op))

        np.testing.assert_allclose(made.logprobs, trained[39:], rtol=0, atol=EXACT)
        np.testing.assert_allclose(scored.logprobs[1:], trained, rtol=0, atol=EXACT)


async def test_before_and_after_twenty_updates_the_numbers_are_the_trainers(engine, trainer):
    """A fresh adapter changes nothing, so that the first comparison is that of the base model."""
    await require_same(engine, trainer, None)
    for version in ("fresh", "trained"):
        await engine.load_adapter(version, to_files(trainer.snapshot("m"), with_optimizer=False))
        await require_same(engine, trainer, version)
        for step in range(20):
            trainer.forward_backward("m", cross_entropy(random_datum(24, seed=step)))
            trainer.optim_step("m", OptimStep(learning_rate=1e-2))

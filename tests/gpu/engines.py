"""Training engines on the device under test, and what they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tests.unit.trainer import references
from tests.unit.trainer.examples import cross_entropy, logprobs, random_datum

from tinsmith.messages.ops import WHOLE, LoraShape
from tinsmith_trainer import base_model
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from tinsmith.messages.ops import Datum, ForwardBackwardDone

DATA = tuple(random_datum(length, seed=length) for length in (40, 7, 23, 64, 90))
PASS_TOKENS = 512


def adapted(folder: Path, device: str, *, tokens: int = PASS_TOKENS, **form) -> TrainingEngine:
    """With model "m", an adapter whose factors are all random."""
    base = base_model.load(str(folder), name="tiny", device=device, **form)
    engine = TrainingEngine(base, microbatch_tokens=tokens)
    engine.create("m", LoraShape(rank=8))
    references.scatter(engine, 0.05)
    return engine


def whole(folder: Path, device: str, **form) -> TrainingEngine:
    """With model "m", which is all of the base."""
    base = base_model.load(str(folder), name="tiny:full", device=device, **form)
    engine = TrainingEngine(base, microbatch_tokens=PASS_TOKENS)
    engine.create("m", WHOLE)
    return engine


def learn(engine: TrainingEngine, data: Sequence[Datum] = DATA) -> ForwardBackwardDone:
    """One call that adds to the gradient of "m"."""
    return engine.forward_backward("m", cross_entropy(*data))


def scores(engine: TrainingEngine, data: Sequence[Datum] = DATA) -> np.ndarray:
    """Log-probabilities of all targets, without a gradient."""
    op = cross_entropy(*data, forward_only=True)
    return np.concatenate(logprobs(engine.forward_backward("m", op)))


def gradient(engine: TrainingEngine, model_id: str = "m") -> Tensor:
    """What is accumulated, on the CPU."""
    return engine._adapters.get(model_id).gradient.cpu()


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The distance of two gradients, as a share of the second one's length."""
    return float((ours - theirs).norm() / theirs.norm())

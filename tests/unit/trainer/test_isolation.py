"""Eight tenants on one engine, interleaved at random pass by pass: each as if it were alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.unit.trainer.examples import random_datum, tensor

from tinsmith.errors import UserError
from tinsmith.messages.ops import Datum, ForwardBackward, LoraShape, OptimStep
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.state import digest

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
STEPS = 4


def policy_datum(length, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 400, length + 1)
    return Datum(
        tokens=tensor(tokens[:-1], "int32"),
        inputs={
            "target_tokens": tensor(tokens[1:], "int64"),
            "logprobs": tensor(rng.uniform(-8, -4, length), "float32"),
            "advantages": tensor(rng.normal(size=length), "float32"),
        },
    )


def poisoned(kind):
    """What a tenant sends whose numbers have gone wrong."""
    weights = [float("nan")] * 5 if kind == "nan" else [1e30] * 5
    bad = random_datum(5, seed=1)
    return Datum(tokens=bad.tokens, inputs={**bad.inputs, "weights": tensor(weights, "float32")})


def script(tenant):
    """A tenant's life as a list of ops, the same however often it is asked for."""
    rng, loss = random.Random(tenant), LOSSES[tenant % len(LOSSES)]
    make = random_datum if loss == "cross_entropy" else policy_datum
    for step in range(STEPS):
        for chunk in range(rng.randint(1, 2)):
            lengths = [rng.randint(1, 70) for _ in range(rng.randint(1, 5))]
            seeds = range(100 * step + 10 * chunk, 1000)
            data = tuple(make(n, seed) for n, seed in zip(lengths, seeds, strict=False))
            yield ForwardBackward(data=data, loss_fn=loss)
        if tenant == 3:
            kind = "nan" if step % 2 else "huge"
            yield ForwardBackward(data=(poisoned(kind),), loss_fn="cross_entropy")
        yield OptimStep(learning_rate=10.0 ** -(1 + tenant % 4), grad_clip_norm=tenant % 2)


def life(engine, tenant):
    """Carries the script out, giving way between passes; returns everything that it came to."""
    model_id = f"m{tenant}"
    engine.create(
        model_id, LoraShape(rank=RANKS[tenant], seed=tenant, train_unembed=tenant % 2 == 0)
    )
    told = []
    for op in script(tenant):
        try:
            if isinstance(op, ForwardBackward):
                told.append((yield from engine.passes(model_id, op)))
            else:
                told.append(engine.optim_step(model_id, op))
                told.append(digest(engine.state(model_id)))
        except UserError as error:
            told.append(str(error))
        yield
    return told, to_files(engine.snapshot(model_id), with_optimizer=True)


def interleaved(lives, seed):
    """Their results, each turn given to one at random."""
    rng, results = random.Random(seed), [None] * len(lives)
    running = dict(enumerate(lives))
    while running:
        tenant = rng.choice(list(running))
        try:
            next(running[tenant])
        except StopIteration as end:
            results[tenant] = end.value
            del running[tenant]
    return results


@pytest.fixture
def fresh(tiny_qwen3):
    def fresh():
        base = base_model.load(str(tiny_qwen3), name="tiny")
        return TrainingEngine(base, microbatch_tokens=128)

    return fresh


@pytest.mark.parametrize("seed", [0, 1])
def test_each_of_eight_interleaved_tenants_is_bit_equal_to_its_solo_run(fresh, seed):
    shared = fresh()
    together = interleaved([life(shared, tenant) for tenant in range(8)], seed)
    for tenant, found in enumerate(together):
        (alone,) = interleaved([life(fresh(), tenant)], 0)

        assert found == alone, f"tenant {tenant}"
    told, _ = together[3]
    assert any("nan" in str(line) for line in told)
    assert any("gradient: its norm" in str(line) for line in told)

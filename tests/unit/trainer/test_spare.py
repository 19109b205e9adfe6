"""Copies in the memory of copies that were written: of their size only, and nobody reads those."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.unit.trainer.examples import cross_entropy, random_datum

from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.compute import Compute
from tinsmith_trainer.executor import Executor

if TYPE_CHECKING:
    from tinsmith.blobs import BlobStore
    from tinsmith_trainer.engine import TrainingEngine


def train(engine: TrainingEngine, model_id: str) -> dict[str, bytes]:
    """One step; the files of what it came to."""
    engine.forward_backward(model_id, cross_entropy(random_datum(20, seed=1)))
    engine.optim_step(model_id, OptimStep(learning_rate=1e-2))
    return dict(to_files(engine.snapshot(model_id), with_optimizer=True))


@pytest.fixture
def trained(engine: TrainingEngine) -> TrainingEngine:
    for model_id, rank in (("m", 4), ("n", 4), ("wide", 8)):
        engine.create(model_id, LoraShape(rank=rank, seed=rank))
        train(engine, model_id)
    return engine


def test_the_next_copy_of_its_size_is_made_over_it(trained: TrainingEngine):
    spent = trained.snapshot("m")
    expected = train(trained, "n")
    trained.spare.keep(spent)

    copied = trained.snapshot("n")

    assert copied.weights is spent.weights
    assert to_files(copied, with_optimizer=True) == expected


def test_it_is_used_once(trained: TrainingEngine):
    trained.spare.keep(trained.snapshot("m"))

    assert trained.snapshot("m").weights is not trained.snapshot("m").weights


def test_nothing_of_another_size_is_made_over_it(trained: TrainingEngine):
    spent = trained.snapshot("m")
    before = dict(to_files(spent, with_optimizer=True))
    trained.spare.keep(spent)

    wide = trained.snapshot("wide")

    assert wide.lora.rank == 8
    assert to_files(spent, with_optimizer=True) == before


async def test_saves_that_overlap_hold_each_its_own_moment(
    trained: TrainingEngine, blobs: BlobStore
):
    compute = Compute()
    executor = Executor(trained, compute, None, blobs, base_model="tiny", patience_s=0)
    serving, saving, expected = asyncio.create_task(compute.serve()), [], []
    found = []
    for _ in range(6):
        expected.append(train(trained, "m"))
        saving.append(asyncio.create_task(executor.store(await executor.copy("m"))))
    for one in saving:
        await executor.restore("m", await one, with_optimizer=True)
        found.append(dict(to_files(trained.snapshot("m"), with_optimizer=True)))
    serving.cancel()
    compute.close()

    assert found == expected

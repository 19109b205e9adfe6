"""Runs that were computed in passes with other models' rows, done again without those models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.trainer.examples import cross_entropy, random_datum
from tests.unit.trainer.recorded import RUN, ListLogbook, Recorder

from tinsmith.cli.replay import Options
from tinsmith.config import Config, ModelConfig
from tinsmith.errors import InvalidRequest
from tinsmith.messages import ops
from tinsmith_trainer.replay import replay

if TYPE_CHECKING:
    from pathlib import Path

X, Y = (random_datum(length, seed=length) for length in (2, 3))
LONG = random_datum(120, seed=9)
STEP = ops.OptimStep(learning_rate=1e-2)


def beside_others(run: Recorder, body: ops.ForwardBackward) -> ops.ForwardBackwardDone:
    """``body`` with its passes shared by another model's rows, as long as they may join."""
    engine = run.engine
    mine, theirs = engine.passes(RUN, body), engine.passes("other", cross_entropy(Y, Y, Y))
    parts = [next(theirs), next(mine)]
    while True:
        is_joint = engine.can_join(parts)
        outcomes = engine.together(parts) if is_joint else [None, None]
        try:
            parts[1] = mine.send(outcomes[1])
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="module")
def recorder(tiny_llama: Path) -> Recorder:
    """One op has passes of both kinds: with rows of tokens beside, and too long for that."""
    run = Recorder(tiny_llama, microbatch_tokens=256)
    run.engine.create("other", ops.LoraShape(rank=8))
    run.do(ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4, seed=3)))
    for body in (cross_entropy(X), cross_entropy(LONG, X), cross_entropy(X, Y)):
        run.do(body, beside_others(run, body))
        run.do(STEP)
    return run


@pytest.fixture
def book(recorder: Recorder) -> ListLogbook:
    return recorder.book()


async def replayed(book: ListLogbook, folder: Path, **options: object):
    config = Config(models=(ModelConfig(name="tiny", path=str(folder)),))
    return await replay(RUN, book, Options(target="", **options), config)


def test_the_log_says_which_passes_had_others(book: ListLogbook):
    beside = ops.Frame(rows=4, first=3, length=3)

    assert book.result(1).frames == (beside,)
    assert book.result(3).frames == (None, beside)
    assert book.result(5).frames == (ops.Frame(rows=5, first=3, length=3),)


async def test_it_is_equal_bit_for_bit(book: ListLogbook, tiny_llama: Path):
    summary = await replayed(book, tiny_llama)

    assert summary.divergence is None
    assert summary.ops_compared == 7


async def test_alone_it_is_equal_within_a_tolerance(book: ListLogbook, tiny_llama: Path):
    summary = await replayed(book, tiny_llama, is_alone=True, tolerance=1e-4)

    assert summary.divergence is None
    assert summary.ops_compared == 7


async def test_alone_without_a_tolerance_is_told_what_is_missing(
    book: ListLogbook, tiny_llama: Path
):
    with pytest.raises(InvalidRequest, match="--alone: op 1 was computed in a pass with other"):
        await replayed(book, tiny_llama, is_alone=True)


@pytest.mark.parametrize(
    "frames",
    [
        (ops.Frame(rows=1 << 40, first=3, length=3),),
        (ops.Frame(rows=4, first=3, length=3),) * 2,
    ],
)
async def test_a_frame_that_cannot_be_is_a_difference(
    book: ListLogbook, tiny_llama: Path, frames: tuple[ops.Frame, ...]
):
    result = book.result(1)
    book.forge_result(
        1, ops.ForwardBackwardDone(
            logprobs=result.logprobs, metrics=result.metrics, passes=result.passes, frames=frames
        )
    )  # fmt: skip
    summary = await replayed(book, tiny_llama)

    assert summary.divergence is not None
    assert summary.divergence.seq == 1

"""A save that is done again must come to the very files that its record names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.unit.trainer.examples import cross_entropy, random_datum
from tests.unit.trainer.recorded import RUN, ListLogbook, Recorder

from tinsmith.cli.replay import Options
from tinsmith.config import Config, ModelConfig
from tinsmith.messages import ops
from tinsmith.messages.base import BlobRef
from tinsmith_trainer.replay import replay

if TYPE_CHECKING:
    from pathlib import Path

    from tinsmith_trainer.replay_report import Summary

STEP = ops.OptimStep(learning_rate=1e-2)
TRAINING, SAMPLING, OLD = 3, 6, 8


@pytest.fixture(scope="module")
def recorder(tiny_llama: Path) -> Recorder:
    """Steps with a save of each kind between them, and one of a version that named no parts."""
    run = Recorder(tiny_llama)
    run.do(ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4, seed=3)))
    run.do(cross_entropy(random_datum(20, seed=1)))
    run.do(STEP)
    run.save(ops.SaveWeights(name="a"))
    run.do(cross_entropy(random_datum(30, seed=2)))
    run.do(STEP)
    run.save(ops.SaveWeightsForSampler(name="b"))
    run.save_state()
    run.do(STEP)
    run.do(ops.SaveWeights(name="c"), ops.SaveWeightsDone(path="x", size_bytes=1))
    return run


@pytest.fixture
def book(recorder: Recorder) -> ListLogbook:
    return recorder.book()


@pytest.fixture
def replayed(tiny_llama: Path):
    async def call(book: ListLogbook, **options: object) -> Summary:
        config = Config(models=(ModelConfig(name="tiny", path=str(tiny_llama)),))
        return await replay(RUN, book, Options(target="", **options), config)

    return call


def forge_part(book: ListLogbook, seq: int, file: str) -> None:
    done = book.result(seq)
    forged = done.parts | {file: BlobRef("0" * 64, done.parts[file].size)}
    book.forge_result(seq, msgspec.structs.replace(done, parts=forged))


async def test_saves_that_name_their_parts_are_done_again(book, replayed):
    summary = await replayed(book)

    assert (summary.verdict, summary.ops_not_repeated) == ("equal", {"saves": 1})
    assert summary.ops_compared == 8


@pytest.mark.parametrize(
    ("seq", "file", "op"),
    [
        (TRAINING, "adapter_model.safetensors", "save_weights"),
        (TRAINING, "optimizer.safetensors", "save_weights"),
        (SAMPLING, "adapter_model.safetensors", "save_weights_for_sampler"),
        (SAMPLING, "adapter_config.json", "save_weights_for_sampler"),
    ],
)
async def test_another_file_than_the_model_makes_is_found(book, replayed, seq, file, op):
    forge_part(book, seq, file)
    at = (await replayed(book)).divergence

    assert (at.seq, at.op, at.expected) == (seq, op, repr("0" * 64))
    assert at.field.startswith(f"parts[{file}]")


async def test_a_file_that_was_left_out_is_found(book, replayed):
    done = book.result(TRAINING)
    parts = {name: ref for name, ref in done.parts.items() if name != "optimizer.safetensors"}
    book.forge_result(TRAINING, msgspec.structs.replace(done, parts=parts))

    assert (await replayed(book)).divergence.field == "parts[optimizer.safetensors]"


async def test_saves_that_only_lead_up_are_not_done_again(book, replayed):
    summary = await replayed(book, first=4)

    assert summary.verdict == "equal"
    assert summary.ops_not_repeated == {"saves": 2}


async def test_with_a_tolerance_files_are_not_compared(book, replayed):
    forge_part(book, TRAINING, "adapter_model.safetensors")
    summary = await replayed(book, tolerance=1e-3)

    assert (summary.verdict, summary.ops_not_repeated) == ("equal", {"saves": 3})


async def test_a_save_before_there_is_a_model_is_found(tiny_llama, replayed):
    run = Recorder(tiny_llama)
    run.do(ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4)))
    run.save(ops.SaveWeights(name="a"))
    book = run.book()
    failed = ops.Failed(category="user", message="m", code="InvalidRequest")
    bad = ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=3))
    book.forge_op(0, bad)
    book.forge_result(0, failed)
    book.replace(book.record(0), state_blake3="")

    assert (await replayed(book)).divergence.seq in (0, 1)

"""Every family: the numbers are those of transformers and PEFT, on the adapter that we export."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.unit.trainer import references
from tests.unit.trainer.examples import cross_entropy, logprobs, random_datum
from transformers import AutoModelForCausalLM

from tinsmith import model_files
from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [  # what PEFT itself says and calls
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
DATA = tuple(random_datum(length, seed=length) for length in (40, 7, 23, 64, 1))


@pytest.fixture(scope="module", params=tiny_model.FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp(request.param), family=request.param)


def engine_on(folder: Path, **shape: object) -> TrainingEngine:
    engine = TrainingEngine(base_model.load(str(folder), name="tiny"), microbatch_tokens=64)
    engine.create("m", LoraShape(**{"rank": 4, **shape}))
    return engine


def test_there_is_a_tiny_model_of_every_family():
    assert set(tiny_model.FAMILIES) == set(model_files.FAMILIES)


def test_a_fresh_adapter_has_the_logprobs_of_the_base_model(folder: Path):
    done = engine_on(folder).forward_backward("m", cross_entropy(*DATA, forward_only=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    for datum, ours in zip(DATA, logprobs(done), strict=True):
        theirs = references.logprobs_of(model, datum).detach().numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_logprobs_and_gradients_are_those_of_peft_on_the_exported_adapter(
    folder: Path, tmp_path: Path
):
    engine = engine_on(folder)
    references.scatter(engine)
    done = engine.forward_backward("m", cross_entropy(*DATA))
    model = references.peft_model(folder, engine, tmp_path)

    references.cross_entropy_of(model, DATA).backward()

    for datum, ours in zip(DATA, logprobs(done), strict=True):
        theirs = references.logprobs_of(model, datum).detach().numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    expected = references.gradients_of(model)
    mine = references.gradients(engine)
    assert mine.keys() == expected.keys()
    for name, gradient in mine.items():
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("group", ["train_attn", "train_mlp", "train_unembed"])
def test_each_group_alone_trains_and_is_read_by_peft(folder: Path, tmp_path: Path, group: str):
    none = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    engine = engine_on(folder, **none | {group: True})
    references.scatter(engine)
    done = engine.forward_backward("m", cross_entropy(*DATA))
    model = references.peft_model(folder, engine, tmp_path)

    loss = references.cross_entropy_of(model, DATA)
    loss.backward()

    assert done.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert references.gradients(engine).keys() == references.gradients_of(model).keys()


def test_a_checkpoint_comes_back_to_the_bit(folder: Path):
    engine = engine_on(folder)
    for _ in range(2):
        engine.forward_backward("m", cross_entropy(*DATA))
        engine.optim_step("m", OptimStep(learning_rate=1e-3))
    files = to_files(engine.snapshot("m"), with_optimizer=True)
    engine.drop("m")
    engine.restore("m", files, with_optimizer=True)

    assert to_files(engine.snapshot("m"), with_optimizer=True) == files


def test_the_router_of_a_mixture_stays_frozen(tmp_path: Path):
    engine = engine_on(tiny_model.build(tmp_path, family="qwen3_moe"), rank=1)
    names = [target.name for target in engine._adapters.get("m").layout.targets]

    assert not any("mlp.gate" in name for name in names)
    assert "model.layers.1.mlp.experts.gate_up_proj" in names

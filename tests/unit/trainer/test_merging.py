"""Merged models: the numbers of the adapter on its base, for every family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.unit.trainer import references
from tests.unit.trainer.examples import cross_entropy, logprobs, random_datum
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinsmith import model_files
from tinsmith.config import ModelConfig
from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import LoraShape
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model, merging
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [  # what PEFT itself says and calls
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
DATA = tuple(random_datum(length, seed=length) for length in (40, 7, 23))


def adapted(folder: Path, **shape: object) -> TrainingEngine:
    engine = TrainingEngine(base_model.load(str(folder), name="tiny"), microbatch_tokens=64)
    engine.create("m", LoraShape(**{"rank": 4, **shape}))
    references.scatter(engine)
    return engine


def written(engine: TrainingEngine, base: Path, folder: Path) -> Path:
    files = to_files(engine.snapshot("m"), with_optimizer=False)
    folder.mkdir()
    merging.main(files, ModelConfig(name="tiny", path=str(base)), folder)
    return folder


def check_equal(engine: TrainingEngine, model: torch.nn.Module) -> None:
    done = engine.forward_backward("m", cross_entropy(*DATA, forward_only=True))
    for datum, ours in zip(DATA, logprobs(done), strict=True):
        theirs = references.logprobs_of(model, datum).detach().numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


OFTEN = ("llama", "qwen3", "qwen3_moe")


@pytest.mark.parametrize(
    "family",
    [
        family if family in OFTEN else pytest.param(family, marks=pytest.mark.slow)
        for family in tiny_model.FAMILIES
    ],
)
def test_the_merged_model_scores_as_trainer_and_peft_do(family: str, tmp_path: Path):
    base = tiny_model.build(tmp_path / "base", family=family)
    engine = adapted(base)

    merged = written(engine, base, tmp_path / "merged")

    check_equal(engine, AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    (tmp_path / "adapter").mkdir()
    check_equal(engine, references.peft_model(base, engine, tmp_path / "adapter"))
    model_files.find(str(merged))  # it can be served
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with pytest.raises(AssertionError):
        check_equal(engine, plain)


@pytest.mark.parametrize("is_head", [True, False])
def test_a_tied_unembedding_is_untied_when_it_is_adapted(
    tiny_llama: Path, tmp_path: Path, is_head: bool
):
    engine = adapted(tiny_llama, train_unembed=is_head)
    merged = written(engine, tiny_llama, tmp_path / "merged")

    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)

    assert base.config.tie_word_embeddings
    assert model.config.tie_word_embeddings is not is_head
    assert torch.equal(model.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert torch.equal(model.lm_head.weight, base.lm_head.weight) is not is_head
    check_equal(engine, model)


def test_tokenizer_files_are_those_of_the_base(tiny_llama: Path, tmp_path: Path):
    merged = written(adapted(tiny_llama), tiny_llama, tmp_path / "merged")

    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names <= {file.name for file in tiny_llama.iterdir()}
    for name in names:
        assert (merged / name).read_bytes() == (tiny_llama / name).read_bytes()
    assert AutoTokenizer.from_pretrained(merged).encode("tin") == AutoTokenizer.from_pretrained(
        tiny_llama
    ).encode("tin")


def test_sums_are_float32_and_rounded_once_to_the_dtype_of_the_base(
    tiny_qwen3: Path, tmp_path: Path
):
    half = tmp_path / "half"
    base = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.bfloat16)
    base.save_pretrained(half)
    engine = adapted(half, train_mlp=False, train_unembed=False)
    merged = written(engine, half, tmp_path / "merged")

    name = "model.layers.1.self_attn.q_proj"
    snapshot = engine.snapshot("m")
    parts = snapshot.layout.named(snapshot.weights)
    delta = snapshot.lora.alpha / snapshot.lora.rank * parts[f"{name}.B"] @ parts[f"{name}.A"]
    expected = (base.get_submodule(name).weight.float() + delta).bfloat16()
    model = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(model.get_submodule(name).weight, expected, rtol=0, atol=2**-9)
    assert torch.equal(model.lm_head.weight, base.lm_head.weight)


def test_an_adapter_of_another_base_is_refused(tiny_llama: Path, tmp_path: Path):
    other = tiny_model.build(tmp_path / "other", family="qwen3_moe")
    with pytest.raises(InvalidRequest, match="does not fit this base model"):
        written(adapted(other), tiny_llama, tmp_path / "merged")

"""Checkpoints: PEFT reads them, training goes on from them, damaged ones are refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from tests.unit.trainer.examples import cross_entropy, logprobs, random_datum, values
from transformers import AutoModelForCausalLM

from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import CONFIG, OPTIMIZER, STATE, WEIGHTS, to_files
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Files = dict[str, bytes]

pytestmark = [  # what PEFT itself says and calls
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

DATA = (random_datum(20, seed=1), random_datum(33, seed=2))
PROBE = random_datum(30, seed=3)


def train(engine: TrainingEngine, model_id: str, steps: int = 1) -> None:
    for _ in range(steps):
        engine.forward_backward(model_id, cross_entropy(*DATA))
        engine.optim_step(model_id, OptimStep(learning_rate=1e-2))


def probe(engine: TrainingEngine, model_id: str) -> np.ndarray:
    return logprobs(engine.forward_backward(model_id, cross_entropy(PROBE, forward_only=True)))[0]


@pytest.fixture
def files(engine: TrainingEngine) -> Files:
    """A training checkpoint of model "m" after three steps."""
    engine.create("m", LoraShape(rank=4, alpha=8.0, seed=5, train_mlp=False))
    train(engine, "m", 3)
    return to_files(engine.snapshot("m"), with_optimizer=True)


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_peft_loads_it_and_gives_the_same_scores(any_folder: Path, tmp_path: Path, rank: int):
    engine = TrainingEngine(base_model.load(str(any_folder), name="tiny"))
    engine.create("m", LoraShape(rank=rank, alpha=16.0))
    train(engine, "m", 3)
    for name, data in to_files(engine.snapshot("m"), with_optimizer=False).items():
        (tmp_path / name).write_bytes(data)

    base = AutoModelForCausalLM.from_pretrained(any_folder)
    model = peft.PeftModel.from_pretrained(base, tmp_path)
    ids = torch.tensor(values(PROBE.tokens), dtype=torch.int64)
    targets = torch.tensor(values(PROBE.inputs["target_tokens"]))
    with torch.no_grad():
        lp = model(input_ids=ids[None]).logits[0].log_softmax(-1)

    ours, theirs = probe(engine, "m"), lp[torch.arange(len(ids)), targets].numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_the_config_names_the_base_and_no_path(files: Files, tiny_llama: Path):
    config = json.loads(files[CONFIG])

    assert config["base_model_name_or_path"] == "tiny"
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")
    assert config["target_modules"] == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]
    assert not any(str(tiny_llama).encode() in data for data in files.values())


def test_a_sampler_checkpoint_holds_only_what_peft_reads(engine: TrainingEngine, files: Files):
    assert to_files(engine.snapshot("m"), with_optimizer=False) == {
        WEIGHTS: files[WEIGHTS],
        CONFIG: files[CONFIG],
    }


def test_a_restored_model_trains_on_bit_for_bit(engine: TrainingEngine, files: Files):
    engine.restore("n", files, with_optimizer=True)
    for model_id in ("m", "n"):
        train(engine, model_id, 2)
    m, n = (to_files(engine.snapshot(i), with_optimizer=True) for i in ("m", "n"))

    assert m == n


def test_another_engine_restores_the_same_bytes(files: Files, tiny_llama: Path):
    other = TrainingEngine(base_model.load(str(tiny_llama), name="tiny"))
    done = other.restore("n", files, with_optimizer=True)

    assert done.lora == LoraShape(rank=4, alpha=8.0, seed=5, train_mlp=False)
    assert to_files(other.snapshot("n"), with_optimizer=True) == files


def test_without_the_optimizer_it_starts_afresh(engine: TrainingEngine, files: Files):
    engine.restore("n", files, with_optimizer=False)
    before = probe(engine, "m"), probe(engine, "n")
    for model_id in ("m", "n"):
        train(engine, model_id)

    assert np.array_equal(*before)
    assert engine.snapshot("n").step == 1
    assert not np.allclose(probe(engine, "m"), probe(engine, "n"), atol=1e-4)


def test_a_load_in_mid_run_drops_the_pending_gradient(engine: TrainingEngine, files: Files):
    train(engine, "m")
    engine.forward_backward("m", cross_entropy(*DATA))
    engine.restore("m", files, with_optimizer=True)
    engine.optim_step("m", OptimStep(learning_rate=1.0))

    assert to_files(engine.snapshot("m"), with_optimizer=True) == files


def test_a_load_of_another_shape_into_a_model_is_refused(engine: TrainingEngine, files: Files):
    engine.create("n", LoraShape(rank=4, alpha=16.0, train_mlp=False))
    before = probe(engine, "n")

    with pytest.raises(InvalidRequest, match=r"alpha: the checkpoint has 8\.0, this model has 16"):
        engine.restore("n", files, with_optimizer=True)

    assert np.array_equal(before, probe(engine, "n"))


def test_training_on_does_not_reach_into_a_snapshot(engine: TrainingEngine, files: Files):
    snapshot = engine.snapshot("m")
    train(engine, "m")

    assert to_files(snapshot, with_optimizer=True) == files
    assert snapshot.step == 3


def test_an_adapter_that_peft_made_is_read(
    engine: TrainingEngine, tiny_llama: Path, tmp_path: Path
):
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    modules = ["gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=modules, init_lora_weights=False)
    peft.get_peft_model(base, config).bfloat16().save_pretrained(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in (WEIGHTS, CONFIG)}

    done = engine.restore("n", files, with_optimizer=False)

    assert done.lora == LoraShape(rank=2, alpha=6.0, train_attn=False, train_unembed=False)
    assert engine.snapshot("n").weights.abs().min() > 0


def change_json(name: str, **fields: Any) -> Callable[[Files], Files]:
    return lambda files: {**files, name: json.dumps({**json.loads(files[name]), **fields}).encode()}


def change_tensors(
    change: Callable[[dict[str, torch.Tensor]], object], name: str = WEIGHTS
) -> Callable[[Files], Files]:
    def changed(files: Files) -> Files:
        tensors = safetensors.torch.load(files[name])
        change(tensors)
        return {**files, name: safetensors.torch.save(tensors)}

    return changed


def without(name: str) -> Callable[[Files], Files]:
    return lambda files: {key: data for key, data in files.items() if key != name}


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

DAMAGE: dict[str, tuple[Callable[[Files], Files], str]] = {
    "no weights": (without(WEIGHTS), f"{WEIGHTS}: the checkpoint does not have it"),
    "no config": (without(CONFIG), f"{CONFIG}: the checkpoint does not have it"),
    "no optimizer": (without(OPTIMIZER), f"{OPTIMIZER}: .* load it without the optimizer"),
    "no state": (without(STATE), f"{STATE}: .* load it without the optimizer"),
    "truncated": (
        lambda files: {**files, WEIGHTS: files[WEIGHTS][:-5]},
        f"{WEIGHTS}: not a valid safetensors file",
    ),
    "pickle": (
        lambda files: {**files, WEIGHTS: b"\x80\x04K\x01."},
        f"{WEIGHTS}: not a valid safetensors file",
    ),
    "config is not JSON": (lambda files: {**files, CONFIG: b"{"}, f"{CONFIG}: "),
    "tensor missing": (change_tensors(lambda t: t.pop(Q)), f"tensor {Q} is missing"),
    "tensor too many": (
        change_tensors(lambda t: t.update(zzz=torch.zeros(1))),
        "tensor zzz is not expected",
    ),
    "wrong size": (
        change_tensors(lambda t: t.update({Q: torch.zeros(4, 65)})),
        rf"{Q} is torch.float32 of shape \[4, 65\], not floats of shape \[4, 64\]",
    ),
    "integers": (
        change_tensors(lambda t: t.update({Q: torch.zeros(4, 64, dtype=torch.int8)})),
        f"{Q} is torch.int8",
    ),
    "NaN": (change_tensors(lambda t: t[Q].fill_(torch.nan)), f"{Q} holds numbers that are not"),
    "moment missing": (
        change_tensors(lambda t: t.pop(f"exp_avg.{Q}"), OPTIMIZER),
        rf"{OPTIMIZER}: tensor exp_avg\.{Q} is missing",
    ),
    "another base": (
        change_json(STATE, base_model="other"),
        "trained on other, this model is on tiny",
    ),
    "another alpha": (change_json(CONFIG, lora_alpha=16), r"alpha is 8\.0, but .* say 16\.0"),
    "later format": (
        change_json(STATE, format=2),
        "format is 2 of adamw, this server reads 1 of adamw",
    ),
    "dora": (change_json(CONFIG, use_dora=True), "use_dora is True, which this server does not"),
    "rslora": (change_json(CONFIG, use_rslora=True), "use_rslora is True"),
    "rank by module": (change_json(CONFIG, rank_pattern={"q_proj": 8}), "rank_pattern is "),
    "odd rank": (change_json(CONFIG, r=3), "rank"),
    "not LoRA": (change_json(CONFIG, peft_type="IA3"), "peft_type is 'IA3'"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_cannot_be_carried_on_is_refused(engine: TrainingEngine, files: Files, case: str):
    damage, message = DAMAGE[case]

    with pytest.raises(InvalidRequest, match=re.compile(message)):
        engine.restore("n", damage(files), with_optimizer=True)

    assert engine.models() == ("m",)

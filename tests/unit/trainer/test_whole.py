"""A model that is trained whole: as a plain torch loop, saved and resumed, one tenant at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.unit.trainer.examples import cross_entropy, logprobs, random_datum
from tests.unit.trainer.references import cross_entropy_of, logprobs_of
from transformers import AutoModelForCausalLM

from tinsmith import whole
from tinsmith.errors import InvalidRequest, NoRoom, StartupError
from tinsmith.messages.ops import WHOLE, OptimStep
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model, whole_files, whole_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

DATA = tuple(random_datum(length, seed=length) for length in (40, 7, 23, 64))
PROBE = random_datum(30, seed=3)
# With a smaller eps, float32 rounding of single gradients near zero is what would be compared.
STEP = OptimStep(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, grad_clip_norm=20.0)
ADAM, DIMUON = OptimStep(learning_rate=1e-3), OptimStep(learning_rate=1e-3, optimizer="dimuon")


def loaded(folder: Path, **options: object) -> TrainingEngine:
    base = base_model.load(str(folder), name="tiny:full", **options)
    return TrainingEngine(base, microbatch_tokens=64)


@pytest.fixture
def engine(tiny_llama: Path) -> TrainingEngine:
    return loaded(tiny_llama)


def train(engine: TrainingEngine, op: OptimStep = ADAM, steps: int = 1) -> None:
    for _ in range(steps):
        engine.forward_backward("m", cross_entropy(*DATA))
        engine.optim_step("m", op)


def probe(engine: TrainingEngine, model_id: str = "m") -> np.ndarray:
    return logprobs(engine.forward_backward(model_id, cross_entropy(PROBE, forward_only=True)))[0]


def state(engine: TrainingEngine, model_id: str = "m") -> str:
    return digest(engine.state(model_id))


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")


@pytest.mark.parametrize("family", tiny_model.FAMILIES)
def test_gradients_of_every_weight_are_autograds(family: tiny_model.Family, tmp_path: Path):
    folder = tiny_model.build(tmp_path, family=family)
    engine, reference = loaded(folder), plain(folder)
    engine.create("m", WHOLE)
    engine.forward_backward("m", cross_entropy(*DATA))
    cross_entropy_of(reference, DATA).backward()

    tenant = engine._adapters.get("m")
    ours = tenant.layout.named(tenant.gradient)
    theirs = {name: one.grad for name, one in reference.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        wanted = torch.zeros(gradient.shape) if theirs[name] is None else theirs[name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=2e-4, msg=name)


def test_steps_are_those_of_a_plain_loop(any_folder: Path):
    engine, reference = loaded(any_folder), plain(any_folder)
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1
    )
    engine.create("m", WHOLE)
    for _ in range(5):
        train(engine, STEP)
        optimizer.zero_grad()
        cross_entropy_of(reference, DATA).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 20.0)
        optimizer.step()

    with torch.no_grad():
        wanted = logprobs_of(reference, PROBE).numpy()
    np.testing.assert_allclose(probe(engine), wanted, rtol=0, atol=1e-5)


def test_in_bfloat16_masters_move_by_less_than_it_can_hold(tiny_llama: Path):
    engine = loaded(tiny_llama, dtype="bfloat16")
    engine.create("m", WHOLE)
    before = engine._adapters.get("m").weights.clone()
    train(engine, OptimStep(learning_rate=1e-6))
    tenant = engine._adapters.get("m")
    model = engine._form._parameters._parameters

    assert tenant.weights.dtype == torch.float32
    assert 0 < (tenant.weights - before).abs().max() < 2e-6
    for name, master in tenant.layout.named(tenant.weights).items():
        assert torch.equal(model[name], master.to(torch.bfloat16)), name


@pytest.mark.parametrize("op", [ADAM, DIMUON], ids=["adamw", "dimuon"])
def test_resuming_with_the_optimizer_gives_every_bit_and_without_it_a_fresh_one(
    any_folder: Path, op: OptimStep
):
    live, warm, cold, fresh = (loaded(any_folder) for _ in range(4))
    live.create("m", WHOLE, op.optimizer)
    train(live, op, 3)
    files = dict(to_files(live.snapshot("m"), with_optimizer=True))
    warm.restore("m", files, with_optimizer=True)
    cold.restore("m", files, with_optimizer=False, optimizer=op.optimizer)
    weights_only = dict(to_files(live.snapshot("m"), with_optimizer=False))
    fresh.restore("m", weights_only, with_optimizer=False, optimizer=op.optimizer)
    assert state(warm) == state(live) != state(cold)
    for engine in (live, warm, cold, fresh):
        train(engine, op, 3)

    assert state(warm) == state(live)
    assert state(cold) == state(fresh) != state(live)


def test_transformers_reads_what_is_saved(any_folder: Path, tmp_path: Path):
    engine = loaded(any_folder)
    engine.create("m", WHOLE)
    train(engine, steps=2)
    for name, data in to_files(engine.snapshot("m"), with_optimizer=False).items():
        (tmp_path / name).write_bytes(data)
    with torch.no_grad():
        wanted = logprobs_of(plain(tmp_path), PROBE).numpy()

    np.testing.assert_allclose(probe(engine), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma2"])
def test_every_kind_of_family_is_read_again(family: tiny_model.Family, tmp_path: Path):
    engine = loaded(tiny_model.build(tmp_path / "base", family=family))
    engine.create("m", WHOLE)
    train(engine, ADAM)
    (tmp_path / "saved").mkdir()
    for name, data in to_files(engine.snapshot("m"), with_optimizer=False).items():
        (tmp_path / "saved" / name).write_bytes(data)
    again = loaded(tmp_path / "saved")
    again.create("m", WHOLE)

    np.testing.assert_allclose(probe(again), probe(engine), rtol=0, atol=1e-6)


def test_pieces_hold_the_same_as_one_file(
    engine: TrainingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine.create("m", WHOLE)
    train(engine)
    before = state(engine)
    monkeypatch.setattr(whole_files, "PIECE_BYTES", 100_000)
    files = dict(to_files(engine.snapshot("m"), with_optimizer=True))
    engine.restore("m", files, with_optimizer=True)
    for name in whole.weight_files(files):
        (tmp_path / name).write_bytes(files[name])

    assert sum(name.startswith("optimizer-") for name in files) > 1
    assert state(engine) == before
    assert len(whole.weight_files(files)) > 3
    with torch.no_grad():
        wanted = logprobs_of(plain(tmp_path), PROBE).numpy()
    np.testing.assert_allclose(probe(engine), wanted, rtol=0, atol=1e-5)


def test_the_next_tenant_starts_from_the_base_and_only_when_the_first_is_gone(
    engine: TrainingEngine,
):
    engine.create("m", WHOLE)
    untrained, began = probe(engine), state(engine)
    train(engine, steps=2)
    with pytest.raises(NoRoom, match="one at a time"):
        engine.create("other", WHOLE)
    engine.drop("m")
    engine.create("other", WHOLE)

    np.testing.assert_array_equal(probe(engine, "other"), untrained)
    assert state(engine, "other") == began


def test_a_pass_that_fails_leaves_the_gradient(engine: TrainingEngine):
    engine.create("m", WHOLE)
    engine.forward_backward("m", cross_entropy(*DATA))
    before = engine._adapters.get("m").gradient.clone()
    bad = random_datum(9)
    bad.inputs["weights"] = type(bad.inputs["weights"])(
        "float32", (9,), np.full(9, 3e38, "<f4").tobytes()
    )
    with pytest.raises(InvalidRequest):
        engine.forward_backward("m", cross_entropy(bad))

    assert torch.equal(engine._adapters.get("m").gradient, before)


DAMAGE = {
    "an adapter": (lambda files: {"adapter_model.safetensors": b""}, "model.safetensors: the"),
    "no optimizer": (lambda files: _without(files, "optimizer.safetensors"), "without the optim"),
    "no state": (lambda files: _without(files, "trainer_state.json"), "without the optimizer"),
    "not safetensors": (lambda files: {**files, "model.safetensors": b"x" * 99}, "not a valid"),
    "other base": (
        lambda files: {
            **files,
            "trainer_state.json": files["trainer_state.json"].replace(b"tiny:full", b"tiny"),
        },
        "was trained on tiny,",
    ),
}


def _without(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    return {key: data for key, data in files.items() if key != name}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_no_checkpoint_of_it_is_refused_and_changes_nothing(
    engine: TrainingEngine, case: str
):
    engine.create("m", WHOLE)
    train(engine)
    files = dict(to_files(engine.snapshot("m"), with_optimizer=True))
    train(engine)
    before = state(engine)
    damage, message = DAMAGE[case]
    with pytest.raises(InvalidRequest, match=message):
        engine.restore("m", damage(files), with_optimizer=True)

    assert state(engine) == before


def test_a_copy_for_which_there_is_no_memory_is_refused_with_figures(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
):
    engine.create("m", WHOLE)
    monkeypatch.setattr(whole_model.memory, "available_bytes", lambda: 1 << 20)

    with pytest.raises(
        NoRoom, match=r"copy of .* takes 0\.\d\d GiB, and 0\.00 GiB of main memory are free"
    ):
        engine.snapshot("m")


def test_a_checkpoint_for_which_there_is_no_memory_is_refused_and_changes_nothing(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
):
    engine.create("m", WHOLE)
    files = dict(to_files(engine.snapshot("m"), with_optimizer=True))
    train(engine)
    before = state(engine)
    monkeypatch.setattr(whole_model.memory, "available_bytes", lambda: 1 << 20)
    with pytest.raises(NoRoom, match="reading all weights"):
        engine.restore("m", files, with_optimizer=True)

    assert state(engine) == before


def test_checkpointing_of_layers_changes_no_bit(tiny_llama: Path):
    states = []
    for checkpointing in (False, True):
        base = base_model.load(str(tiny_llama), name="tiny:full")
        engine = TrainingEngine(base, microbatch_tokens=64, checkpointing=checkpointing)
        engine.create("m", WHOLE)
        train(engine, steps=2)
        states.append(state(engine))

    assert states[0] == states[1]


def test_a_model_that_does_not_fit_is_refused_before_loading(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(base_model.memory, "available_bytes", lambda: 1 << 20)

    with pytest.raises(StartupError, match=r"for training all weights in float32.*full = true"):
        loaded(tiny_llama)


def test_tied_weights_stay_tied(engine: TrainingEngine):
    engine.create("m", WHOLE)
    train(engine, steps=2)
    model = engine._passes._base.model

    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sum("embed" in part.name for part in engine._adapters.get("m").layout.parts) == 1

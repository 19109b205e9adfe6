"""Dimuon is torch's Muon on matrices of hidden layers, and torch's AdamW on the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from tests.unit.trainer.examples import cross_entropy, random_datum

from tinsmith.errors import InvalidRequest, UnusableGradient
from tinsmith.messages.ops import WHOLE, LoraShape, OptimStep
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model, dimuon, optim
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.layout import Layout, Part
from tinsmith_trainer.optim import Moments
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SHAPES = {"square": (12, 12), "wide": (8, 40), "tall": (40, 8), "one row": (1, 30)}
LAYOUT = Layout(
    [
        Part("embedding", (30, 8)),
        *(Part(name, shape, lambda view: view[None]) for name, shape in SHAPES.items()),
        Part("experts", (3, 10, 6), lambda view: view),
        Part("norm", (8,)),
    ]
)
DATA = tuple(random_datum(length, seed=length) for length in (40, 7, 23))


def by_the_book(gradient: Tensor, momentum: Tensor, op: OptimStep) -> Tensor:
    """What a Muon step takes from one matrix, in float64, as its author writes it."""
    momentum.mul_(op.beta1).add_(gradient, alpha=1 - op.beta1)
    x = (1 - op.beta1) * gradient + op.beta1 * momentum
    rows, columns = x.shape
    if rows > columns:
        x = x.T
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if rows > columns else x
    return op.learning_rate * 0.2 * math.sqrt(max(rows, columns)) * x


def test_steps_equal_the_formulas_in_float64():
    torch.manual_seed(0)
    weights = torch.randn(LAYOUT.size)
    state = Moments.fresh("dimuon", weights, LAYOUT)
    parts = {name: view.double().clone() for name, view in LAYOUT.named(weights).items()}
    momenta = {name: torch.zeros_like(part) for name, part in parts.items()}
    rest = [parts["embedding"].requires_grad_(), parts["norm"].requires_grad_()]
    adamw = torch.optim.AdamW(rest, betas=(0.8, 0.95), eps=1e-12, weight_decay=0.0)
    for n in range(4):
        op = OptimStep(optimizer="dimuon", learning_rate=10.0 ** -(n + 1), beta1=0.8)
        gradient = torch.randn(LAYOUT.size)
        theirs = {name: view.double() for name, view in LAYOUT.named(gradient).items()}
        adamw.param_groups[0]["lr"] = op.learning_rate
        for one, name in zip(rest, ("embedding", "norm"), strict=True):
            one.grad = theirs[name].clone()
        adamw.step()
        for name in SHAPES:
            parts[name] -= by_the_book(theirs[name], momenta[name], op)
        for e in range(3):
            parts["experts"][e] -= by_the_book(theirs["experts"][e], momenta["experts"][e], op)
        optim.step(weights, gradient.clone(), state, op, LAYOUT)

    for name, view in LAYOUT.named(weights).items():
        wanted = parts[name].detach().float()
        torch.testing.assert_close(view, wanted, rtol=1e-5, atol=1e-5, msg=name)
    assert (state.steps, len(state.exp_avg_sq)) == (4, 30 * 8 + 8)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_matrix_moves_as_torchs_muon_moves_it(shape: tuple[int, int]):
    """Torch rounds to bfloat16 in the iteration, so only so closely."""
    torch.manual_seed(0)
    layout = Layout([Part("w", shape, lambda view: view[None])])
    ours = torch.randn(layout.size)
    theirs = ours.clone().view(shape).requires_grad_()
    muon = torch.optim.Muon(
        [theirs], lr=1e-2, momentum=0.9, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    state, before = Moments.fresh("dimuon", ours, layout), ours.clone()
    for _ in range(3):
        theirs.grad = torch.randn(shape)
        op = OptimStep(optimizer="dimuon", learning_rate=1e-2)
        optim.step(ours, theirs.grad.flatten().clone(), state, op, layout)
        muon.step()

    moved, wanted = ours - before, theirs.detach().flatten() - before
    assert (moved - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("shape", [(64, 64), (16, 200), (200, 16)])
def test_singular_values_come_out_near_one(shape: tuple[int, int]):
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = torch.linalg.svdvals(dimuon.orthogonal(update[None])[0])

    assert found.min() > 0.3
    assert found.max() < 1.3


def test_a_zero_gradient_moves_nothing():
    assert not dimuon.orthogonal(torch.zeros(2, 5, 3)).any()


def test_clipping_is_over_all_parts():
    weights = torch.zeros(LAYOUT.size)
    states = [Moments.fresh("dimuon", weights, LAYOUT) for _ in range(2)]
    gradient = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))
    for state, clip in zip(states, (0.0, 1.0), strict=True):
        op = OptimStep(optimizer="dimuon", grad_clip_norm=clip)
        norm = optim.step(weights.clone(), gradient.clone(), state, op, LAYOUT)
        assert norm == pytest.approx(gradient.norm().item())

    torch.testing.assert_close(states[1].exp_avg, states[0].exp_avg / (norm + 1e-6))


def engine_of(folder: Path, name: str = "tiny") -> TrainingEngine:
    return TrainingEngine(base_model.load(str(folder), name=name), microbatch_tokens=64)


def train(engine: TrainingEngine, steps: int = 1, model_id: str = "m") -> None:
    for _ in range(steps):
        engine.forward_backward(model_id, cross_entropy(*DATA))
        engine.optim_step(model_id, OptimStep(optimizer="dimuon", learning_rate=1e-3))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_adapters_factors_move_one_by_one_and_the_unembeddings_by_adamw(
    family: tiny_model.Family, tmp_path: Path
):
    engine = engine_of(tiny_model.build(tmp_path, family=family))
    engine.create("m", LoraShape(rank=4), "dimuon")
    train(engine, 2)
    adapter = engine._adapters.get("m")
    before = adapter.weights.clone()
    train(engine)
    moved = adapter.weights.detach() - before
    matrices = adapter.layout.matrices(moved)

    assert [part.name for part in adapter.layout.rest().parts] == ["lm_head.A", "lm_head.B"]
    for name, moves in matrices.items():
        for one in moves:
            scale = 1e-3 * 0.2 * math.sqrt(max(one.shape))
            assert torch.linalg.svdvals(one).max() / scale < 1.3, name
    if family == "qwen3_moe":
        assert matrices["model.layers.0.mlp.experts.down_proj.B"].shape == (4, 64, 4)


def test_resuming_gives_every_bit_and_another_optimizer_is_refused(tiny_llama: Path):
    live, warm = engine_of(tiny_llama), engine_of(tiny_llama)
    live.create("m", LoraShape(rank=4), "dimuon")
    train(live, 2)
    files = to_files(live.snapshot("m"), with_optimizer=True)
    warm.restore("m", files, with_optimizer=True)
    for engine in (live, warm):
        train(engine, 2)
    assert digest(warm.state("m")) == digest(live.state("m"))
    warm.create("other", LoraShape(rank=4))

    with pytest.raises(InvalidRequest, match="the checkpoint is of 'dimuon', this model was"):
        warm.restore("other", files, with_optimizer=True)
    with pytest.raises(InvalidRequest, match=r"DimuonParams, but this model .* 'adamw'"):
        train(warm, model_id="other")
    with pytest.raises(InvalidRequest, match=r"AdamParams, but this model .* 'dimuon'"):
        warm.optim_step("m", OptimStep())
    warm.restore("other", files, with_optimizer=False)
    assert warm._adapters.get("other").optimizer.family == "adamw"


def test_the_optimizers_family_is_part_of_the_state(tiny_llama: Path):
    engine = engine_of(tiny_llama)
    engine.create("a", LoraShape(rank=4, train_mlp=False))
    engine.create("d", LoraShape(rank=4, train_mlp=False), "dimuon")

    assert digest(engine.state("a")) != digest(engine.state("d"))


def test_a_gradient_that_is_not_usable_changes_nothing(tiny_llama: Path):
    engine = engine_of(tiny_llama, "tiny:full")
    engine.create("m", WHOLE, "dimuon")
    train(engine)
    before = digest(engine.state("m"))
    engine.forward_backward("m", cross_entropy(*DATA))
    engine._adapters.get("m").gradient[5] = math.nan
    with pytest.raises(UnusableGradient):
        engine.optim_step("m", OptimStep(optimizer="dimuon"))

    assert digest(engine.state("m")) == before
    assert not engine.has_gradient("m")

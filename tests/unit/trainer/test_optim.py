"""The optimizer is torch's AdamW, guarded."""

from __future__ import annotations

import math

import pytest
import torch

from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import OptimStep
from tinsmith_trainer import optim

N = 1000


def ready() -> tuple[torch.Tensor, torch.Tensor, optim.Moments]:
    """Weights and gradient at random, and moments after one step."""
    torch.manual_seed(0)
    weights, gradient = torch.randn(N), torch.randn(N)
    state = optim.Moments.like(weights)
    optim.step(weights, torch.randn(N), state, OptimStep())
    return weights, gradient, state


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_steps_equal_torch_with_hyperparameters_that_change(clip: float):
    torch.manual_seed(0)
    ours = torch.randn(N)
    theirs = ours.clone().requires_grad_()
    state, reference = optim.Moments.like(ours), torch.optim.AdamW([theirs])
    for n in range(5):
        op = OptimStep(
            learning_rate=10.0**-n, beta1=0.8, eps=1e-6, weight_decay=0.1, grad_clip_norm=clip
        )
        theirs.grad = torch.randn(N)
        norm = optim.step(ours, theirs.grad.clone(), state, op)
        if clip:
            assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_([theirs], clip).item())
        reference.param_groups[0].update(
            lr=op.learning_rate, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1
        )
        reference.step()

    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
    assert state.steps == 5


def test_a_rate_of_zero_leaves_every_bit():
    weights, gradient, state = ready()
    before = weights.clone()

    optim.step(weights, gradient, state, OptimStep(learning_rate=0.0, weight_decay=0.1))

    assert torch.equal(before, weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e25])
def test_a_gradient_that_is_not_usable_changes_nothing(bad: float):
    weights, gradient, state = ready()
    before = [weights.clone(), state.exp_avg.clone(), state.exp_avg_sq.clone()]
    gradient[7] = bad

    with pytest.raises(InvalidRequest, match="gradient: its norm is"):
        optim.step(weights, gradient, state, OptimStep(grad_clip_norm=1.0))

    after = [weights, state.exp_avg, state.exp_avg_sq]
    assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))
    assert state.steps == 1


def test_weights_without_a_gradient_stay_finite_at_the_smallest_eps():
    weights, gradient, state = torch.ones(N), torch.zeros(N), optim.Moments.like(torch.ones(N))

    optim.step(weights, gradient, state, OptimStep(eps=1e-37))

    assert torch.equal(weights, torch.ones(N))


def test_the_largest_gradient_and_rate_give_finite_weights():
    weights, state = torch.ones(N), optim.Moments.like(torch.ones(N))

    optim.step(weights, torch.full((N,), 1e16), state, OptimStep(learning_rate=1e4))

    assert torch.isfinite(weights).all()
    assert torch.isfinite(state.exp_avg_sq).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-4),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("learning_rate", 1e5),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", math.nan),
        ("eps", 0.0),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("weight_decay", 1e6),
        ("grad_clip_norm", -1.0),
        ("grad_clip_norm", math.inf),
    ],
)
def test_a_hyperparameter_out_of_range_is_named(field: str, value: float):
    weights, gradient, state = ready()
    before = weights.clone()

    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        optim.step(weights, gradient, state, OptimStep(**{field: value}))

    assert torch.equal(before, weights)

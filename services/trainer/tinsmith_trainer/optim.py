"""AdamW on one flat tensor: all factors of an adapter are one array, and so are its moments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.errors import InvalidRequest, UnusableGradient

if TYPE_CHECKING:
    from tinsmith.messages.ops import OptimStep

_LARGEST_RATE = 1e4
"""No step of this rate takes finite weights out of float32's range; useful ones are below 1."""
_SMALLEST_EPS = 1e-37
"""Below float32's normal numbers eps is zero, and 0 / 0 for weights without a gradient."""
_LARGEST_NORM = 1e18
"""Near 1e19 a float32 square overflows, and with it the second moment for good."""


@dataclass(slots=True)
class AdamState:
    """The moments of an adapter's weights; float32 of the weights' shape."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: int = 0

    @classmethod
    def like(cls, weights: Tensor) -> AdamState:
        """The state before the first step."""
        return cls(torch.zeros_like(weights), torch.zeros_like(weights))

    def copied(self, device: torch.device) -> AdamState:
        """A copy on ``device``."""
        return AdamState(
            self.exp_avg.to(device, copy=True), self.exp_avg_sq.to(device, copy=True), self.steps
        )


def check(op: OptimStep) -> None:
    """Raises InvalidRequest unless every hyperparameter is in its range."""
    _check_range("learning_rate", op.learning_rate, 0.0, _LARGEST_RATE)
    _check_range("beta1", op.beta1, 0.0, math.nextafter(1.0, 0.0))
    _check_range("beta2", op.beta2, 0.0, math.nextafter(1.0, 0.0))
    _check_range("eps", op.eps, _SMALLEST_EPS, 1.0)
    _check_range("grad_clip_norm", op.grad_clip_norm, 0.0, math.inf)
    _check_range("weight_decay", op.weight_decay, 0.0, math.inf)
    if op.learning_rate * op.weight_decay > 1:
        raise InvalidRequest(
            f"weight_decay: {op.weight_decay:g} times learning_rate {op.learning_rate:g} is more "
            "than 1, which turns the sign of every weight; lower one of them"
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    """NaN is in no range, and infinity is not a number to compute with."""
    if not (low <= value <= high and math.isfinite(value)):
        raise InvalidRequest(f"{name}: {value:g} is out of range; use {low:g} to {high:g}")


def norm_of(gradient: Tensor) -> float:
    """The global L2 norm.

    Raises:
        UnusableGradient: it is NaN, infinite, or so large that AdamW would overflow.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    if not norm <= _LARGEST_NORM:
        raise UnusableGradient(
            f"gradient: its norm is {norm:g}, over the limit of {_LARGEST_NORM:g}; no step was "
            "made and what was accumulated since the last one is dropped: lower the weights or "
            "advantages of the datums, or go back to a checkpoint from before the model diverged"
        )
    return norm


@torch.no_grad()
def step(weights: Tensor, gradient: Tensor, state: AdamState, op: OptimStep) -> float:
    """One step of torch's AdamW in place; the norm of the gradient before it was clipped.

    ``gradient`` is spent. Clipping scales it to ``grad_clip_norm`` as
    ``torch.nn.utils.clip_grad_norm_`` does.

    Raises:
        InvalidRequest: a hyperparameter is out of range.
        UnusableGradient: the gradient is not finite. ``weights`` and ``state`` are unchanged in
            both cases.
    """
    check(op)
    norm = norm_of(gradient)
    if op.grad_clip_norm:
        gradient *= min(1.0, op.grad_clip_norm / (norm + 1e-6))
    adamw(
        [weights],
        [gradient],
        [state.exp_avg],
        [state.exp_avg_sq],
        [],
        [torch.tensor(float(state.steps), device=weights.device)],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=op.beta1,
        beta2=op.beta2,
        lr=op.learning_rate,
        weight_decay=op.weight_decay,
        eps=op.eps,
    )
    state.steps += 1
    return norm

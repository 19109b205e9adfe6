"""One optimizer step on a tenant's flat arrays: AdamW, or Dimuon (``dimuon``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinsmith.errors import InvalidRequest, UnusableGradient
from tinsmith_trainer import dimuon
from tinsmith_trainer.adamw import Stepped, adamw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tinsmith.messages.ops import OptimizerFamily, OptimStep
    from tinsmith_trainer.layout import Layout

_LARGEST_RATE = 1e4
"""No step of this rate takes finite weights out of float32's range; useful ones are below 1."""
_SMALLEST_EPS = 1e-37
"""Below float32's normal numbers eps is zero, and 0 / 0 for weights without a gradient."""
NORM_BLOCK = 1 << 16
"""Numbers of a block where ranks have slices of a gradient: what a GPU reduces in one piece."""
_LARGEST_NORM = 1e18
"""Near 1e19 a float32 square overflows, and with it the second moment for good."""


@dataclass(slots=True)
class Moments:
    """What an optimizer knows of the gradients before: all of its state. float32."""

    exp_avg: Tensor  # of the weights' shape
    exp_avg_sq: Tensor  # likewise; of Dimuon, of ``layout.rest()`` alone
    steps: int = 0
    family: OptimizerFamily = "adamw"

    @classmethod
    def like(cls, weights: Tensor) -> Moments:
        """AdamW's before the first step."""
        return cls(torch.zeros_like(weights), torch.zeros_like(weights))

    @classmethod
    def fresh(cls, family: OptimizerFamily, weights: Tensor, layout: Layout) -> Moments:
        """Those of ``family`` before the first step."""
        if family == "adamw":
            return cls.like(weights)
        second = weights.new_zeros(layout.rest().size)
        return cls(torch.zeros_like(weights), second, family=family)

    def copied(self, device: torch.device) -> Moments:
        """A copy on ``device``."""
        return Moments(
            self.exp_avg.to(device, copy=True),
            self.exp_avg_sq.to(device, copy=True),
            self.steps,
            self.family,
        )

    def copied_over(self, other: Moments) -> Moments:
        """A copy in the memory of ``other``, which is of equal shapes and of no use afterwards."""
        first = other.exp_avg.copy_(self.exp_avg)
        return Moments(first, other.exp_avg_sq.copy_(self.exp_avg_sq), self.steps, self.family)

    def moved(self, device: torch.device) -> Moments:
        """Itself on ``device``, a copy only where it lies elsewhere."""
        first, second = self.exp_avg.to(device), self.exp_avg_sq.to(device)
        return Moments(first, second, self.steps, self.family)


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


def norm_of(gradient: Tensor, block: int = 0) -> float:
    """The global L2 norm; made of those of blocks of so many numbers, unless ``block`` is 0.

    Raises:
        UnusableGradient: see ``joined``.
    """
    if not block:
        return _usable(float(torch.linalg.vector_norm(gradient)))
    return joined(block_norms(gradient, block))


def block_norms(gradient: Tensor, block: int) -> list[float]:
    """The norms of consecutive blocks of so many numbers, the last one perhaps of fewer.

    Each depends on its own block alone, and not on how many there are.
    """
    found: list[float] = torch.stack(torch._foreach_norm(torch.split(gradient, block))).tolist()  # noqa: SLF001 - as torch's own clipping
    return found


def joined(norms: Iterable[float]) -> float:
    """The norm of an array from those of its blocks, in whatever order they come.

    Raises:
        UnusableGradient: it is NaN, infinite, or so large that AdamW would overflow.
    """
    return _usable(math.sqrt(math.fsum(norm * norm for norm in norms)))  # fsum rounds once


def _usable(norm: float) -> float:
    if not norm <= _LARGEST_NORM:
        raise UnusableGradient(
            f"gradient: its norm is {norm:g}, over the limit of {_LARGEST_NORM:g}; no step was "
            "made and what was accumulated since the last one is dropped: lower the weights or "
            "advantages of the datums, or go back to a checkpoint from before the model diverged"
        )
    return norm


def check_block(block: int) -> None:
    """Raises InvalidRequest for blocks that no norm is made of."""
    if block not in {0, NORM_BLOCK}:
        raise InvalidRequest(
            f"norm_block: {block} is neither 0 nor {NORM_BLOCK}; the log is damaged, or from "
            "another version of Tinsmith"
        )


def check_family(state: Moments, op: OptimStep) -> None:
    """Raises InvalidRequest for the step of another optimizer than the model's.

    The moments of one mean nothing to the other: a change is a new model from a saved state.
    """
    if op.optimizer != state.family:
        sent = {"adamw": "AdamParams", "dimuon": "DimuonParams"}
        raise InvalidRequest(
            f"optim_params: {sent[op.optimizer]}, but this model was created with the optimizer "
            f"{state.family!r}; send {sent[state.family]}, or create a model from a saved state "
            "without its optimizer, and with the other one"
        )


@torch.no_grad()
def step(
    weights: Tensor,
    gradient: Tensor,
    state: Moments,
    op: OptimStep,
    layout: Layout | None = None,
    *,
    measure: Callable[[Tensor], float] = norm_of,
) -> float:
    """One step in place, by torch's AdamW or by Dimuon; the gradient's norm before clipping.

    ``gradient`` is spent. Clipping scales it to ``grad_clip_norm`` as
    ``torch.nn.utils.clip_grad_norm_`` does. Dimuon needs the ``layout`` of the arrays. ``measure``
    takes the norm of the gradient, of which this may be a part.

    Raises:
        InvalidRequest: a hyperparameter is out of range, or the step is of another optimizer.
        UnusableGradient: the gradient is not finite. ``weights`` and ``state`` are unchanged in
            both cases.
    """
    check(op)
    check_family(state, op)
    norm = measure(gradient)
    if op.grad_clip_norm:
        gradient *= min(1.0, op.grad_clip_norm / (norm + 1e-6))
    if state.family == "dimuon":
        if layout is None:
            msg = "a Dimuon step must be told which parts of the arrays are matrices"
            raise TypeError(msg)
        dimuon.step(weights, gradient, state, op, layout)
    else:
        array = Stepped(weights, gradient, state.exp_avg, state.exp_avg_sq)
        adamw([array], op, steps=state.steps)
    state.steps += 1
    return norm

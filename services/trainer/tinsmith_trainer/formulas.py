"""The formulas of the loss functions, with their slopes written out.

For each token: lp its log-probability, q the one it was sampled with, A its advantage,
r = exp(lp - q). ``docs/losses.md`` has them all with their defaults. A token whose advantage is
zero adds nothing, whatever its ratio is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinsmith_trainer.loss import HIGH, LOW, SAMPLED, Terms

if TYPE_CHECKING:
    from torch import Tensor

    from tinsmith_trainer.loss import Inputs, Settings

SEQUENCE_RATIO = "sequence_ratio"
RATIO_CAP = 2.0
LOG_RATIO_CAP = 5.0
"""Bounds of ``stable_reinforce``; with them no token's slope exceeds
RATIO_CAP * (|A| + kl_coeff * LOG_RATIO_CAP)."""


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Terms:
    """-sum(w * lp). Weights may be negative or fractional: custom losses arrive in this form."""
    del settings  # has none
    slope = -inputs["weights"]
    return Terms(slope * logprobs, slope)


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Terms:
    """-sum(r * A)."""
    del settings  # has none
    loss = -_gain(_ratio(logprobs, inputs), inputs)
    return Terms(loss, loss)


def ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Terms:
    """-sum(min(r * A, clamp(r, low, high) * A))."""
    del settings  # came as inputs
    return _clipped_gain(_ratio(logprobs, inputs), inputs)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Terms:
    """-sum(stopgrad(clamp(r, low, high)) * lp * A)."""
    del settings  # came as inputs
    slope = -_clamped(_ratio(logprobs, inputs), inputs) * inputs["advantages"]
    return Terms(slope * logprobs, slope)


def dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Terms:
    """-sum(lp * A - 0.5 * beta * (lp - q)^2)."""
    drift = logprobs - inputs["logprobs"]
    pull = settings["beta"] * drift
    advantages = inputs["advantages"]
    return Terms(0.5 * pull * drift - logprobs * advantages, pull - advantages)


def gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Terms:
    """-sum(min(s * A, clamp(s, low, high) * A)), s of the sequence with each token's slope."""
    del logprobs, settings  # the ratio was made of them
    return _clipped_gain(inputs[SEQUENCE_RATIO], inputs)


def sequence_ratio(logprobs: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """exp(mean of lp - q over the mask) at every token; 1 where the mask is empty."""
    chosen = inputs["sequence_ratio_mask"] != 0
    drift = (logprobs - inputs["logprobs"]).masked_fill(~chosen, 0.0)
    mean = drift.sum(dtype=torch.float64) / chosen.sum().clamp(min=1)
    return {SEQUENCE_RATIO: mean.exp().to(logprobs.dtype).expand_as(logprobs)}


def stable_reinforce(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Terms:
    """-sum over sampled tokens of w * (A * lp - kl_coeff * h(lp - q)).

    w = stopgrad(min(r, RATIO_CAP)); h is d^2 / 2, going on as a straight line where d exceeds
    LOG_RATIO_CAP. Our own bounded objective in the place of one that is not published.
    """
    sampled = inputs[SAMPLED] != 0
    drift = (logprobs - inputs["logprobs"]).masked_fill(~sampled, 0.0)
    weight = drift.exp().clamp(max=RATIO_CAP) * sampled
    near = drift.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    pull = settings["kl_coeff"] * near.masked_fill(inputs["sequence_ratio_mask"] == 0, 0.0)
    advantages = inputs["advantages"]
    return Terms(
        weight * (pull * (drift - 0.5 * near) - advantages * logprobs),
        weight * (pull - advantages),
    )


def is_ppo_clipped(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Where the bound, and not the ratio, decides."""
    return _is_bound(_ratio(logprobs, inputs), inputs)


def is_gspo_clipped(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """The tokens of sequences whose ratio is bounded, by the sign of the advantage."""
    return _is_bound(sequence_ratio(logprobs, inputs)[SEQUENCE_RATIO], inputs)


def is_cispo_clipped(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Where the ratio lies outside of its bounds."""
    ratio = _ratio(logprobs, inputs)
    return (ratio < inputs[LOW]) | (ratio > inputs[HIGH])


def is_capped(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Where a sampled token's ratio is over the cap."""
    return (_ratio(logprobs, inputs) > RATIO_CAP) & (inputs[SAMPLED] != 0)


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clamped(ratio: Tensor, inputs: Inputs) -> Tensor:
    return torch.clamp(ratio, inputs[LOW], inputs[HIGH])


def _gain(ratio: Tensor, inputs: Inputs) -> Tensor:
    """The ratio times A; zero for A = 0, even where the ratio overflows."""
    return (ratio * inputs["advantages"]).masked_fill(inputs["advantages"] == 0, 0.0)


def _is_bound(ratio: Tensor, inputs: Inputs) -> Tensor:
    return _gain(ratio, inputs) > _gain(_clamped(ratio, inputs), inputs)


def _clipped_gain(ratio: Tensor, inputs: Inputs) -> Terms:
    gain, bounded = _gain(ratio, inputs), _gain(_clamped(ratio, inputs), inputs)
    return Terms(-torch.minimum(gain, bounded), (-gain).masked_fill(gain > bounded, 0.0))

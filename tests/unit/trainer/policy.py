"""The loss functions once more, as one writes them for autograd: what ours are compared with.

Each takes one datum's log-probabilities and inputs, float64 [n], and gives the loss as a scalar.
"""

from __future__ import annotations

import torch

LOSSES = {}


def reference(function):
    LOSSES[function.__name__] = function
    return function


def ratio(lp, x):
    return torch.exp(lp - x["logprobs"])


def clipped(r, x, low, high):
    bounds = x.get("clip_low_threshold", low), x.get("clip_high_threshold", high)
    low, high = (torch.as_tensor(bound, dtype=torch.float64) for bound in bounds)
    return torch.max(torch.min(r, high), low)


@reference
def cross_entropy(lp, x):
    return -(x["weights"] * lp).sum()


@reference
def importance_sampling(lp, x):
    return -(ratio(lp, x) * x["advantages"]).sum()


@reference
def ppo(lp, x, clip_low_threshold=0.8, clip_high_threshold=1.2):
    r, advantages = ratio(lp, x), x["advantages"]
    bounded = clipped(r, x, clip_low_threshold, clip_high_threshold)
    return -torch.min(r * advantages, bounded * advantages).sum()


@reference
def cispo(lp, x, clip_low_threshold=0.0, clip_high_threshold=4.0):
    weight = clipped(ratio(lp, x), x, clip_low_threshold, clip_high_threshold).detach()
    return -(weight * lp * x["advantages"]).sum()


@reference
def dro(lp, x, beta=0.05):
    return -(lp * x["advantages"] - 0.5 * beta * (lp - x["logprobs"]) ** 2).sum()


@reference
def gspo(lp, x, clip_low_threshold=0.8, clip_high_threshold=1.2):
    advantages = x["advantages"]
    mask = x.get("sequence_ratio_mask", advantages) != 0
    sequence = torch.exp((lp - x["logprobs"])[mask].mean()) if mask.any() else torch.tensor(1.0)
    s = sequence.detach() * torch.exp(lp - lp.detach())
    bounded = clipped(s, x, clip_low_threshold, clip_high_threshold)
    return -torch.min(s * advantages, bounded * advantages).sum()


@reference
def stable_reinforce(lp, x, kl_coeff=0.01):
    drift = lp - x["logprobs"]
    weight = torch.exp(drift).detach().clamp(max=2.0) * x["sampled"]
    far = drift.abs() > 5
    penalty = torch.where(far, 5 * (drift.abs() - 2.5), drift**2 / 2)
    penalty = penalty * (x.get("sequence_ratio_mask", torch.ones_like(lp)) != 0)
    return -(weight * (x["advantages"] * lp - kl_coeff * penalty)).sum()

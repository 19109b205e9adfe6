"""The norms of a served model: one operation of torch's each, where that gives the same bits.

Written out, as in the models of Hugging Face, a norm is eight operations on as little as one row,
and in a decoding pass each call costs about as much as it computes.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tinsmith_sampler.linear_kernels import pattern

if TYPE_CHECKING:
    from torch import nn

_HEIGHTS = (1, 4, 7, 33)
"""Rows that both ways are tried on."""


def install(model: nn.Module) -> int:
    """Replace what the norms of a model compute by; returns of how many. Weights stay theirs."""
    norms = [module for module in model.modules() if _is_norm(module) and _is_same(module)]
    for module in norms:
        module.forward = _norm(module)
    return len(norms)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_row = isinstance(weight, torch.Tensor) and weight.dim() == 1
    return is_row and isinstance(getattr(module, "variance_epsilon", None), float)


def _norm(module: Any) -> partial[torch.Tensor]:  # noqa: ANN401 - any family's module
    weight, eps = module.weight, module.variance_epsilon
    shape = tuple(weight.shape)
    return partial(functional.rms_norm, normalized_shape=shape, weight=weight, eps=eps)


@torch.inference_mode()
def _is_same(module: Any) -> bool:  # noqa: ANN401
    """By trial: families differ in what they do with the weight, and in where they round.

    With other weights than its own, which may be replaced, and of ones would tell nothing.
    """
    trial, width = deepcopy(module), len(module.weight)
    trial.weight.copy_(pattern(1, width)[0])
    norm = _norm(trial)
    rows = (pattern(count, width).to(trial.weight)[None] for count in _HEIGHTS)
    return all(torch.equal(trial(x), norm(x)) for x in rows)

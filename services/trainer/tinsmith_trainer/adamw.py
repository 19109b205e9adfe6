"""torch's AdamW as a function of flat arrays or of parts of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.messages.ops import OptimStep


class Stepped(NamedTuple):
    """An array of weights and what a step needs of it, all float32 of one shape."""

    weights: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def adamw(arrays: Sequence[Stepped], op: OptimStep, *, steps: int) -> None:
    """Step the weights and the moments in place; ``steps`` were made before."""
    torch_adamw(
        [one.weights for one in arrays],
        [one.gradient for one in arrays],
        [one.exp_avg for one in arrays],
        [one.exp_avg_sq for one in arrays],
        [],
        [torch.tensor(float(steps), device=one.weights.device) for one in arrays],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=op.beta1,
        beta2=op.beta2,
        lr=op.learning_rate,
        weight_decay=op.weight_decay,
        eps=op.eps,
    )

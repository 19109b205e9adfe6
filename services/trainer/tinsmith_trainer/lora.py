"""The LoRA arithmetic: how an adapted matrix computes, and how its factors begin.

    y = W x + (alpha / r) B A x        A float32 [r, in], B float32 [out, r]

A ``LoraLinear`` stands in the model where a linear layer stood and owns nothing but that layer.
The factors belong to an adapter; ``ActiveAdapter`` says whose factors the current pass uses, so
any number of adapters share one copy of the base and the layers know none of them.

Shapes: N tokens, I in, O out, R rank.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.errors import InvalidRequest
from tinsmith_trainer.frozen import frozen_linear, weight_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tinsmith.messages.ops import LoraShape

MAX_RANK = 128


class LoraPair(NamedTuple):
    """The factors of one adapted matrix, and alpha / r."""

    A_RI: Tensor
    B_OR: Tensor
    scale: float


class ActiveAdapter:
    """Whose factors the layers add in the current pass; outside of one, nobody's."""

    def __init__(self) -> None:
        self.pairs: Mapping[str, LoraPair] = {}

    @contextmanager
    def use(self, pairs: Mapping[str, LoraPair]) -> Iterator[None]:
        """Let every layer named in ``pairs`` add its product inside the block."""
        self.pairs = pairs
        try:
            yield
        finally:
            self.pairs = {}


class LoraLinear(nn.Module):
    """A frozen linear layer to which the active adapter adds its product."""

    def __init__(self, name: str, base: nn.Linear, active: ActiveAdapter) -> None:
        super().__init__()
        self.name = name
        self.base = base
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        """Float [..., in] to float [..., out], in the dtype of the base."""
        pair = self.active.pairs.get(self.name)
        if pair is None:
            return frozen_linear(x, self.base)
        y: Tensor = _AdaptedLinear.apply(x, self.base, *pair)  # type: ignore[no-untyped-call]
        return y


class _AdaptedLinear(torch.autograd.Function):
    """Base and low-rank product in one node.

    Beside ``x`` it keeps only the [N, R] intermediate for the backward pass, and it adds the
    low-rank terms onto the base's results inside the matrix products: no [N, O] or [N, I]
    temporary is made, which is what adapters cost most on a CPU.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives its contexts no type
        x: Tensor,
        base: nn.Linear,
        A_RI: Tensor,
        B_OR: Tensor,
        scale: float,
    ) -> Tensor:
        x_NI = x.reshape(-1, base.in_features)
        A_RI, B_OR = A_RI.to(x.dtype), B_OR.to(x.dtype)
        h_NR = (x_NI @ A_RI.T).mul_(scale)
        y_NO = F.linear(x_NI, weight_of(base, x.dtype), base.bias).addmm_(h_NR, B_OR.T)
        ctx.save_for_backward(x_NI, A_RI, B_OR, h_NR)
        ctx.base, ctx.scale = base, scale
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x_NI, A_RI, B_OR, h_NR = ctx.saved_tensors
        g_NO = grad_y.reshape(-1, ctx.base.out_features)
        g_NR = (g_NO @ B_OR).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_NI = (g_NO @ weight_of(ctx.base, g_NO.dtype)).addmm_(g_NR, A_RI)
            grad_x = grad_NI.view(*grad_y.shape[:-1], -1)
        return grad_x, None, (g_NR.T @ x_NI).float(), (g_NO.T @ h_NR).float(), None


def check_shape(shape: LoraShape) -> None:
    """Raises InvalidRequest unless an adapter of this shape can be made."""
    rank, alpha = shape.rank, shape.alpha
    if not 1 <= rank <= MAX_RANK or rank & (rank - 1):
        raise InvalidRequest(
            f"lora_config.rank: {rank} is not a power of two from 1 to {MAX_RANK}; "
            "choose one of 1, 2, 4, 8, 16, 32, 64, 128"
        )
    if not (math.isfinite(alpha) and alpha > 0):
        raise InvalidRequest(f"lora_config.alpha: {alpha} is not a positive number; use 32")
    if not (shape.train_attn or shape.train_mlp or shape.train_unembed):
        raise InvalidRequest(
            "lora_config: train_attn, train_mlp and train_unembed are all false, which leaves "
            "nothing to train; set at least one of them"
        )


def init_factors(A_RI: Tensor, B_OR: Tensor, generator: torch.Generator) -> None:
    """Fill in place as PEFT does: A Kaiming-uniform with a = sqrt(5), B zero.

    On the CPU only, and in steps of which each is exact or rounds once: every machine gets the
    same bits.
    """
    bound = 1 / math.sqrt(A_RI.shape[1])
    A_RI.uniform_(generator=generator).mul_(2).sub_(1).mul_(bound)
    B_OR.zero_()

"""The LoRA arithmetic: how an adapted matrix computes, and how its factors begin.

    y = W x + (alpha / r) B A x        A float32 [r, in], B float32 [out, r]

A ``LoraLinear`` stands in the model where a linear layer stood and owns nothing but that layer.
The factors belong to an adapter; ``ActiveAdapter`` says whose factors the current pass uses, so
any number of adapters share one copy of the base and the layers know none of them. A pass may have
rows of several models: one product with the base's matrix serves all of them, and each group
of rows has the low-rank products of its own adapter, with its own rank.

Shapes: N tokens, n those of one group, I in, O out, R rank.
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


class Group(NamedTuple):
    """Neighbouring rows of a pass that have one adapter, and its factors by layer."""

    rows: int
    pairs: Mapping[str, LoraPair]


class ActiveAdapter:
    """Whose factors the layers add in the current pass; outside of one, nobody's."""

    def __init__(self) -> None:
        self.groups: tuple[Group, ...] = ()
        """They cover the rows of the pass in order; with none there is no adapter."""
        self.root = torch.zeros((), requires_grad=True)
        """What autograd takes for the input of layers that add to gradients by themselves."""

    @contextmanager
    def use(self, pairs: Mapping[str, LoraPair]) -> Iterator[None]:
        """Let every layer named in ``pairs`` add its product inside the block."""
        with self.share((Group(1, pairs),)):
            yield

    @contextmanager
    def share(self, groups: tuple[Group, ...]) -> Iterator[None]:
        """Let every layer add, to the rows of each group, the product of that group's factors."""
        self.groups = groups
        try:
            yield
        finally:
            self.groups = ()

    def spans(self, tokens: int) -> Iterator[tuple[slice, Mapping[str, LoraPair]]]:
        """Each group's range of the ``tokens`` of all rows, which have as many each."""
        length, start = tokens // max(1, sum(group.rows for group in self.groups)), 0
        for group in self.groups:
            yield slice(start, start := start + group.rows * length), group.pairs

    def of(self, name: str, tokens: int) -> tuple[tuple[slice, LoraPair], ...]:
        """The factors of the layer ``name``, and the range of tokens that each are for."""
        return tuple((span, pairs[name]) for span, pairs in self.spans(tokens) if name in pairs)


class LoraLinear(nn.Module):
    """A frozen linear layer to which the active adapters add their products.

    Its backward pass adds to the ``grad`` of the factors itself; they must have one.
    """

    def __init__(self, name: str, base: nn.Linear, active: ActiveAdapter) -> None:
        super().__init__()
        self.name = name
        self.base = base
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        """Float [..., in] to float [..., out], in the dtype of the base."""
        parts = self.active.of(self.name, x.numel() // x.shape[-1])
        if not parts:
            return frozen_linear(x, self.base)
        y: Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
            x, self.base, parts, self.active.root
        )
        return y


class _AdaptedLinear(torch.autograd.Function):
    """Base and low-rank products in one node.

    Beside ``x`` it keeps only the [n, R] intermediates for the backward pass, and it adds the
    low-rank terms onto the base's results inside the matrix products: no [N, O] or [N, I]
    temporary is made, which is what adapters cost most on a CPU. Nor is there one of a factor's
    size: a pass over few tokens would do little but write and read these.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives its contexts no type
        x: Tensor,
        base: nn.Linear,
        parts: tuple[tuple[slice, LoraPair], ...],
        root: Tensor,  # noqa: ARG004 - makes the result one that has a gradient
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO = F.linear(x_NI, weight_of(base, x.dtype), base.bias)
        kept = [x_NI]
        for span, pair in parts:
            h_nR = torch.mm(_within(x_NI, span), pair.A_RI.to(x.dtype).t())
            _within(y_NO, span).addmm_(h_nR, pair.B_OR.to(x.dtype).t(), alpha=pair.scale)
            kept.append(h_nR)
        ctx.save_for_backward(*kept)
        ctx.base, ctx.parts = base, parts
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x_NI, *kept = ctx.saved_tensors
        g_NO = grad_y.reshape(-1, grad_y.shape[-1])
        grad_NI = None
        if ctx.needs_input_grad[0]:
            grad_NI = torch.mm(g_NO, weight_of(ctx.base, g_NO.dtype))
        for (span, pair), h_nR in zip(ctx.parts, kept, strict=True):
            g_nO = _within(g_NO, span)
            g_nR = torch.mm(g_nO, pair.B_OR.to(g_nO.dtype))
            if grad_NI is not None:
                A_RI = pair.A_RI.to(g_nR.dtype)
                _within(grad_NI, span).addmm_(g_nR, A_RI, alpha=pair.scale)
            add_product(pair.A_RI, g_nR.t(), _within(x_NI, span), pair.scale)
            add_product(pair.B_OR, g_nO.t(), h_nR, pair.scale)
        grad_x = None if grad_NI is None else grad_NI.view(*grad_y.shape[:-1], -1)
        return grad_x, None, None, None


def _within(tensor: Tensor, span: slice) -> Tensor:
    """``tensor[span]``; a pass of one group makes thousands of views less."""
    return tensor if span.stop - span.start == tensor.shape[0] else tensor[span]


def add_product(factor: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add ``scale * left @ right`` to the float32 gradient of ``factor``, which must have one.

    To be called where autograd records nothing.
    """
    if (grad := factor.grad) is None:
        msg = "layers add to gradients that the caller of a pass must have made room for"
        raise RuntimeError(msg)
    if left.dtype == grad.dtype:
        grad.addmm_(left, right, alpha=scale)
    else:
        grad.add_(left @ right, alpha=scale)


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

"""Experts of a mixture: 3-D weights of which each token uses a few, and their low-rank products.

    y = W_e x + (alpha / r) B_e A_e x        for a token that the router sent to expert e

transformers keeps the weights of all experts of a layer in two parameters, ``gate_up_proj`` and
``down_proj``. Each is one matrix to adapt, whose factors PEFT (``target_parameters``) lays out for
all experts at once: A float32 [E * r, I] expert by expert, B float32 [O, r * E] with the expert as
the fastest index. The router is not adapted; gradients pass through it.

Shapes: T tokens, K experts of each, S = T * K rows sorted by expert, E experts, I in, O out,
R rank, H hidden.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith_trainer.packed_experts import PackedExperts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tinsmith_trainer.lora import ActiveAdapter, LoraPair

GATE_UP, DOWN = "gate_up_proj", "down_proj"


class Bank(NamedTuple):
    """The frozen weights of all experts for one product."""

    weight: Tensor | PackedExperts  # [E, O, I], or [E, I, O] if it is transposed
    is_transposed: bool
    bias: Tensor | None  # [E, O]

    @property
    def size(self) -> tuple[int, int, int]:
        """E, O, I."""
        experts, rows, columns = self.weight.shape
        return (experts, columns, rows) if self.is_transposed else (experts, rows, columns)

    def of_expert(self, expert: int) -> Tensor:
        """One expert's matrix [O, I]: a view, or made anew from codes."""
        return self.weight[expert].T if self.is_transposed else self.weight[expert]


def is_experts(module: nn.Module) -> bool:
    """Whether this is a module of transformers that holds all experts of a layer."""
    weight = getattr(module, GATE_UP, None)
    return isinstance(weight, nn.Parameter | PackedExperts) and len(weight.shape) == 3


class LoraExperts(nn.Module):
    """Stands where a module of experts stood, and adds the active adapter's products."""

    def __init__(self, name: str, base: nn.Module, active: ActiveAdapter) -> None:
        super().__init__()
        self.name = name
        self.base: Any = base
        self.active = active

    def bank(self, matrix: str) -> Bank:
        """The frozen weights of ``gate_up_proj`` or ``down_proj``."""
        bias = getattr(self.base, f"{matrix}_bias") if self.base.has_bias else None
        return Bank(getattr(self.base, matrix), self.base.is_transposed, bias)

    def forward(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """What the chosen experts make of each token, weighted: float [T, H].

        Each group of rows by itself: an expert's products are small already.
        """
        spans = tuple(self.active.spans(len(x_TH))) or ((slice(None), {}),)
        parts = [
            self._of_group(x_TH[span], experts_TK[span], weights_TK[span], pairs)
            for span, pairs in spans
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _of_group(
        self,
        x_TH: Tensor,
        experts_TK: Tensor,
        weights_TK: Tensor,
        pairs: Mapping[str, LoraPair],
    ) -> Tensor:
        tokens, chosen = experts_TK.shape
        order_S = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=self.base.num_experts).tolist()
        x_SH = x_TH.repeat_interleave(chosen, dim=0)[order_S]
        inner = self.base._apply_gate(self._product(GATE_UP, x_SH, counts, pairs))  # noqa: SLF001
        y_SH = self._product(DOWN, inner, counts, pairs) * weights_TK.flatten()[order_S, None]
        # Back in the order of the tokens, each sum has the same order whatever the neighbours.
        y_TKH = y_SH[order_S.argsort()].view(tokens, chosen, -1)
        return y_TKH.sum(dim=1).to(x_TH.dtype)

    def _product(
        self,
        matrix: str,
        x_SI: Tensor,
        counts: Sequence[int],
        pairs: Mapping[str, LoraPair],
    ) -> Tensor:
        pair = pairs.get(f"{self.name}.{matrix}") or (None, None, 0.0)
        y: Tensor = _AdaptedExperts.apply(  # type: ignore[no-untyped-call]
            x_SI, self.bank(matrix), counts, *pair
        )
        return y


class _AdaptedExperts(torch.autograd.Function):
    """One product of every expert with its rows, base and low-rank in one node."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives its contexts no type
        x_SI: Tensor,
        bank: Bank,
        counts: Sequence[int],
        A: Tensor | None,
        B: Tensor | None,
        scale: float,
    ) -> Tensor:
        factors = None if A is None or B is None else _Factors.of(A, B, len(counts), x_SI.dtype)
        y_SO = x_SI.new_empty(len(x_SI), bank.size[1])
        h_SR = x_SI.new_empty(len(x_SI), 0 if factors is None else factors.A_ERI.shape[1])
        for e, rows in _spans(counts):
            torch.mm(x_SI[rows], bank.of_expert(e).T, out=y_SO[rows])
            if bank.bias is not None:
                y_SO[rows] += bank.bias[e]
            if factors is not None:
                h_SR[rows] = (x_SI[rows] @ factors.A_ERI[e].T).mul_(scale)
                y_SO[rows].addmm_(h_SR[rows], factors.B_EOR[e].T)
        ctx.save_for_backward(x_SI, h_SR)
        ctx.bank, ctx.counts, ctx.factors, ctx.scale = bank, counts, factors, scale
        return y_SO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x_SI, h_SR = ctx.saved_tensors
        factors: _Factors | None = ctx.factors
        grad_SI = torch.empty_like(x_SI) if ctx.needs_input_grad[0] else None
        grads = None if factors is None else factors.zeros()
        for e, rows in _spans(ctx.counts):
            g_NO = grad_SO[rows]
            if grad_SI is not None:
                torch.mm(g_NO, ctx.bank.of_expert(e), out=grad_SI[rows])
            if factors is None or grads is None:
                continue
            g_NR = (g_NO @ factors.B_EOR[e]).mul_(ctx.scale)
            grads.A_ERI[e] = g_NR.T @ x_SI[rows]
            grads.B_EOR[e] = g_NO.T @ h_SR[rows]
            if grad_SI is not None:
                grad_SI[rows].addmm_(g_NR, factors.A_ERI[e])
        return grad_SI, None, None, *((None, None) if grads is None else grads.flat()), None


class _Factors(NamedTuple):
    """A and B of each expert."""

    A_ERI: Tensor
    B_EOR: Tensor

    @classmethod
    def of(cls, A: Tensor, B: Tensor, experts: int, dtype: torch.dtype) -> _Factors:
        """From PEFT's layout, in the dtype of the pass."""
        A_ERI = A.view(experts, -1, A.shape[1]).to(dtype)
        B_EOR = B.view(len(B), -1, experts).permute(2, 0, 1).to(dtype)
        return cls(A_ERI, B_EOR.contiguous())

    def zeros(self) -> _Factors:
        """Room for gradients; an expert that no token chose keeps zero."""
        return _Factors(
            torch.zeros_like(self.A_ERI, dtype=torch.float32),
            torch.zeros_like(self.B_EOR, dtype=torch.float32),
        )

    def flat(self) -> tuple[Tensor, Tensor]:
        """In PEFT's layout."""
        A = self.A_ERI.view(-1, self.A_ERI.shape[2])
        return A, self.B_EOR.permute(1, 2, 0).reshape(self.B_EOR.shape[1], -1)


def factors_by_expert(A: Tensor, B: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """PEFT's layout of both factors as A [E, r, I] and B [E, O, r]."""
    factors = _Factors.of(A, B, experts, A.dtype)
    return factors.A_ERI, factors.B_EOR


def _spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The rows of each expert that has any."""
    for e, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        if start < end:
            yield e, slice(start, end)

"""The LoRA arithmetic: which matrices are adapted, and how an adapted one computes.

    y = W x + (alpha / r) B A x        A float32 [r, in], B float32 [out, r]

A ``LoraLinear`` stands in the model where a linear layer stood and owns nothing but that layer.
The factors belong to an adapter; ``ActiveAdapter`` says whose factors the current pass uses, so
any number of adapters share one copy of the base and the layers know none of them.

Shapes: N tokens, I in, O out, R rank.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.errors import InvalidRequest, StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

    from tinsmith.messages.ops import LoraShape

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
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
            return F.linear(x, self.base.weight, self.base.bias)
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
        y_NO = F.linear(x_NI, base.weight, base.bias).addmm_(h_NR, B_OR.T)
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
            grad_x = (g_NO @ ctx.base.weight).addmm_(g_NR, A_RI).view(*grad_y.shape[:-1], -1)
        return grad_x, None, (g_NR.T @ x_NI).float(), (g_NO.T @ h_NR).float(), None


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix that can be adapted: its module's name in the causal model, and its size."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Targets:
    """Every matrix that can be adapted, in the order that fixes initialisation and layout."""

    attn: tuple[Target, ...]
    mlp: tuple[Target, ...]
    unembed: Target

    def of(self, shape: LoraShape) -> tuple[Target, ...]:
        """The matrices that an adapter of this shape adapts."""
        return (
            *(self.attn if shape.train_attn else ()),
            *(self.mlp if shape.train_mlp else ()),
            *((self.unembed,) if shape.train_unembed else ()),
        )


def inject(model: PreTrainedModel, active: ActiveAdapter) -> Targets:
    """Replace the attention and MLP matrices of ``model`` by ``LoraLinear`` layers.

    The unembedding stays as it is: its product is formed by ``head``, on the output side only,
    so tied input embeddings never change.

    Raises:
        StartupError: a layer lacks one of the matrices, as in architectures that fuse them.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    modules = dict(model.named_modules())
    unembed = next(name for name, module in modules.items() if module is head)
    groups = [_group(model, modules, suffixes) for suffixes in (ATTENTION, MLP)]
    for name in (name for group in groups for name in group):
        parent, _, leaf = name.rpartition(".")
        setattr(modules[parent], leaf, LoraLinear(name, modules[name], active))
    attn, mlp = (tuple(_target(name, modules[name]) for name in group) for group in groups)
    return Targets(attn, mlp, _target(unembed, head))


def _group(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], suffixes: tuple[str, ...]
) -> list[str]:
    """The names of all linear layers called so, of which every decoder layer must have each."""
    names = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in suffixes
    ]
    layers = model.config.get_text_config().num_hidden_layers
    for suffix in suffixes:
        found = sum(name.endswith(f".{suffix}") for name in names)
        if found != layers:
            raise StartupError(
                f"model: {type(model).__name__} is not an architecture that adapters are known "
                f"for: its {layers} layers have {found} linear modules called {suffix}; "
                "serve a dense model of the Llama or Qwen family"
            )
    return names


def _target(name: str, module: nn.Module) -> Target:
    if not isinstance(module, nn.Linear):
        raise StartupError(f"model: {name} is a {type(module).__name__}, not a linear layer")
    return Target(name, module.in_features, module.out_features)


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

"""The weight of a frozen matrix, however it is stored: dense, 4-bit NF4 or 8-bit.

Quantised weights are turned back into the dtype of the pass for one product and let go again, in
the forward pass and once more in the backward pass: nothing dense is ever kept. That is what
QLoRA does for NF4. The 8-bit form is used in the same way, so that activations are never rounded
and a row's numbers do not depend on outliers elsewhere in the pass.

Shapes: N tokens, I in, O out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tinsmith.model_files import Quantization

_INT8_STEP = 1 / 127
"""bitsandbytes stores a row of int8 with the largest magnitude of the row."""


def is_quantised(linear: nn.Linear) -> bool:
    """Whether bitsandbytes holds the weight."""
    return not linear.weight.is_floating_point()


def weight_of(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The weight [O, I]: the parameter itself, or in ``dtype`` from its quantised form."""
    weight: Any = linear.weight
    if weight.is_floating_point():
        return weight  # type: ignore[no-any-return]
    if weight.dtype == torch.int8 and weight.SCB is None:
        # bitsandbytes' own forward pass takes the scales away from the weight.
        state: Any = linear.state
        return _from_int8(weight.data, state.SCB, dtype)
    return dense(weight, dtype)


def keep_layout(model: nn.Module) -> None:
    """Have bitsandbytes leave the codes of ``model`` as they are.

    Its own forward pass packs 4-bit codes anew on CPUs with products in bfloat16, for kernels that
    round to that; ``dense`` would read them as other numbers.
    """
    each: Any
    for each in model.modules():
        if hasattr(each, "support_avx512bf16_for_cpu"):
            each.support_avx512bf16_for_cpu = False


def quantised(W_OI: Tensor, quantization: Quantization, device: torch.device) -> nn.Parameter:
    """A matrix of floats on the host as codes on ``device``: what ``dense`` turns back."""
    from bitsandbytes.nn import Int8Params, Params4bit

    whole: Any = (
        Params4bit(W_OI, quant_type="nf4", compress_statistics=True)
        if quantization == "nf4"
        else Int8Params(W_OI, requires_grad=False)
    )
    return whole.to(device)  # type: ignore[no-any-return]  # this is what quantises


def dense(codes: Any, dtype: torch.dtype) -> Tensor:  # noqa: ANN401 - of bitsandbytes' two kinds
    """The matrix [O, I] that ``codes`` stand for."""
    if codes.dtype == torch.int8:
        return _from_int8(codes.data, codes.SCB, dtype)
    from bitsandbytes.functional import dequantize_4bit

    floats: Tensor = dequantize_4bit(codes.data, codes.quant_state)
    return floats.to(dtype)


def scales(codes: Any) -> Tensor:  # noqa: ANN401 - as above
    """What ``codes`` are multiplied by, as bytes [n]."""
    if codes.dtype == torch.int8:
        found = [codes.SCB]
    else:
        state = codes.quant_state
        found = [state.absmax, state.offset, state.state2.absmax]
    return torch.cat([one.detach().cpu().reshape(-1).view(torch.uint8) for one in found])


def _from_int8(codes_OI: Tensor, scales_O: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes_OI * (scales_O[:, None] * _INT8_STEP)).to(dtype)


def frozen_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """Float [..., I] to [..., O]; keeps nothing dense for the backward pass."""
    if not is_quantised(linear):
        return F.linear(x, linear.weight, linear.bias)
    y: Tensor = _QuantisedProduct.apply(x, linear)  # type: ignore[no-untyped-call]
    return y


class _QuantisedProduct(torch.autograd.Function):
    """torch's own would keep the dense weight until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear) -> Tensor:  # noqa: ANN401
        ctx.linear = linear
        return F.linear(x, weight_of(linear, x.dtype), linear.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grad_y @ weight_of(ctx.linear, grad_y.dtype), None

"""A mixture of experts in 4 or 8 bits.

bitsandbytes quantises linear layers while transformers loads them. Experts are 3-D parameters, of
which it knows nothing: so a mixture is loaded in floats on the host, and goes from there to its
device in codes, matrix by matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from tinsmith_trainer import experts, frozen
from tinsmith_trainer.packed_experts import PackedExperts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from tinsmith.model_files import Quantization


def quantise(model: PreTrainedModel, quantization: Quantization, device: torch.device) -> None:
    """Hold ``model``, which is in floats on the host, in codes on ``device``.

    Embedding, unembedding, norms and routers stay floats. What was quantised is let go at once.
    """
    model.set_experts_implementation("eager")  # others take all experts of a layer in one tensor
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) and module is not head:
            model.set_submodule(name, _linear(module, quantization, device))
        elif experts.is_experts(module):
            for matrix in (experts.GATE_UP, experts.DOWN):
                _pack(module, matrix, quantization, device)
    model.to(device)  # type: ignore[arg-type]  # its decorator hides the signature


def _linear(linear: nn.Linear, quantization: Quantization, device: torch.device) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    dtype = linear.weight.dtype
    made: Any = (
        Linear4bit(*sizes, compute_dtype=dtype, device="meta")
        if quantization == "nf4"
        else Linear8bitLt(*sizes, has_fp16_weights=False, device="meta")
    )
    made.weight = frozen.quantised(linear.weight.data, quantization, device)
    made.bias = linear.bias
    return made  # type: ignore[no-any-return]


def _pack(
    module: Any,  # noqa: ANN401 - any family's
    matrix: str,
    quantization: Quantization,
    device: torch.device,
) -> None:
    weight = getattr(module, matrix).data
    delattr(module, matrix)
    packed = PackedExperts(weight, quantization, device, is_transposed=bool(module.is_transposed))
    setattr(module, matrix, packed)

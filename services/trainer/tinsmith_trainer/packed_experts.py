"""The weights of a layer's experts in 4 or 8 bits: one expert's is turned into floats at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tinsmith_trainer import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from tinsmith.model_files import Quantization


class PackedExperts(nn.Module):
    """Stands where the parameter [E, O, I] or [E, I, O] stood, and is indexed like it."""

    def __init__(
        self,
        weight: Tensor,
        quantization: Quantization,
        device: torch.device,
        *,
        is_transposed: bool,
    ) -> None:
        """``weight`` is on the host, and [E, I, O] if it is transposed."""
        super().__init__()
        self.shape = weight.shape
        self._dtype = weight.dtype
        self._is_transposed = is_transposed
        matrices = weight.transpose(1, 2) if is_transposed else weight
        self._codes = nn.ParameterList(
            frozen.quantised(W_OI.contiguous(), quantization, device) for W_OI in matrices
        )

    def get_extra_state(self) -> Tensor:
        """What else belongs to the weights: a digest of the base takes it in."""
        return torch.cat([frozen.scales(one) for one in self._codes])

    def __getitem__(self, expert: int) -> Tensor:
        """One expert's matrix in floats, made anew."""
        W_OI = frozen.dense(self._codes[int(expert)], self._dtype)
        return W_OI.T if self._is_transposed else W_OI

"""What a model is, in one digest: its shape, weights, moments and step count.

Two models of equal digest answer every future request with equal bits on the same machine. The
accumulated gradient is no part of it: digests are taken where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from blake3 import blake3

from tinsmith.cores import threads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from tinsmith.messages.ops import LoraShape
    from tinsmith_trainer.optim import Moments

_THREADS = max(2, threads(0))
"""Those cores that do not compute, two at least; the value is the same with any number."""


@dataclass(frozen=True)
class StateView:
    """A model's state, not copied: only valid until the model's next step or load."""

    lora: LoraShape
    weights: Tensor  # float32 [n]
    optimizer: Moments

    def tensors(self) -> Iterable[Tensor]:
        """Weights and both moments, in this order; in any number of consecutive pieces."""
        return self.weights, self.optimizer.exp_avg, self.optimizer.exp_avg_sq


def digest(view: StateView) -> str:
    """blake3, in hex, of shape, steps, weights and both moments, in this order.

    The shape as msgpack, the step count as 8 bytes, tensors as little-endian float32. An optimizer
    that is not AdamW stands before the step count by its name.
    """
    hasher = blake3(msgspec.msgpack.encode(view.lora), max_threads=_THREADS)
    if view.optimizer.family != "adamw":  # whose digests are older than the other
        hasher.update(view.optimizer.family.encode())
    hasher.update(view.optimizer.steps.to_bytes(8, "little"))
    for tensor in view.tensors():
        hasher.update(tensor.detach().to("cpu", torch.float32).numpy().view("u1").data)
    return hasher.hexdigest()

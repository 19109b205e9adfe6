"""The adapters of all models: weights, accumulated gradient and optimizer state of each.

An adapter's factors are views into one flat float32 array, and so are their gradients. Adding,
clipping, stepping and copying are then one operation each, whatever the number of matrices, and
a dropped adapter is a handful of arrays that nothing refers to any more.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import Tensor

from tinsmith.errors import InvalidRequest, NotFound
from tinsmith_trainer import optim
from tinsmith_trainer.lora import LoraPair, init_factors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinsmith.messages.ops import LoraShape
    from tinsmith_trainer.targets import Target

_SEED_BYTES = 8


class Layout:
    """Where each factor lies in the flat array: A then B, target by target."""

    def __init__(self, targets: Sequence[Target], rank: int) -> None:
        self._targets = tuple(targets)
        self._rank = rank
        self.size = sum(self._rows(t) * (t.in_features + t.out_features) for t in targets)

    @property
    def targets(self) -> tuple[Target, ...]:
        """What the array has the factors of, in its order."""
        return self._targets

    def _rows(self, target: Target) -> int:
        """Rows of A and columns of B: the rank, once for each expert."""
        return self._rank * max(1, target.experts)

    def views(self, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The factors A [r, in] and B [out, r] of each target by its name, as views.

        Those of E experts are [E * r, in] and [out, r * E]; see ``experts``.
        """
        views = {}
        start = 0
        for target in self._targets:
            rows = self._rows(target)
            middle = start + rows * target.in_features
            end = middle + target.out_features * rows
            A_RI = flat[start:middle].view(rows, target.in_features)
            B_OR = flat[middle:end].view(target.out_features, rows)
            views[target.name] = (A_RI, B_OR)
            start = end
        return views


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an adapter was at one moment, on the CPU: all that a checkpoint holds."""

    base_model: str
    lora: LoraShape
    layout: Layout
    weights: Tensor  # float32 [layout.size]
    optimizer: optim.AdamState

    @property
    def step(self) -> int:
        """Optimizer steps behind these weights, counted from when the optimizer was fresh."""
        return self.optimizer.steps


class Adapter:
    """One model's trainable state."""

    def __init__(
        self, lora: LoraShape, layout: Layout, weights: Tensor, optimizer: optim.AdamState
    ) -> None:
        """Takes over ``weights`` and ``optimizer``."""
        self.lora = lora
        self.layout = layout
        self.weights = weights
        self.optimizer = optimizer
        self.gradient: Tensor | None = None
        """What the ops since the last step added up to; None if there were none."""
        scale = lora.alpha / lora.rank
        self.pairs = {
            name: LoraPair(A_RI.requires_grad_(), B_OR.requires_grad_(), scale)
            for name, (A_RI, B_OR) in self.layout.views(self.weights).items()
        }

    @classmethod
    def fresh(cls, lora: LoraShape, targets: Sequence[Target], device: torch.device) -> Adapter:
        """Factors drawn from the seed in the order of the targets; no steps taken."""
        layout = Layout(targets, lora.rank)
        weights = torch.zeros(layout.size)
        generator = torch.Generator().manual_seed(_mixed(lora.seed))
        for A_RI, B_OR in layout.views(weights).values():
            init_factors(A_RI, B_OR, generator)
        weights = weights.to(device)
        return cls(lora, layout, weights, optim.AdamState.like(weights))

    @classmethod
    def restored(cls, snapshot: Snapshot, device: torch.device) -> Adapter:
        """The adapter that ``snapshot`` was taken of; shares no memory with it."""
        weights = snapshot.weights.to(device, copy=True)
        return cls(snapshot.lora, snapshot.layout, weights, snapshot.optimizer.copied(device))

    def snapshot(self, base_model: str) -> Snapshot:
        """Copies of the weights and the optimizer's state."""
        cpu = torch.device("cpu")
        weights = self.weights.to(cpu, copy=True)
        return Snapshot(base_model, self.lora, self.layout, weights, self.optimizer.copied(cpu))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect gradients in the block and add them up at its end.

        A block that fails leaves the accumulated gradient as it was. Whether the sum is one that
        a step can use is decided by the step.
        """
        fresh = torch.zeros_like(self.weights)
        for name, (grad_A, grad_B) in self.layout.views(fresh).items():
            self.pairs[name].A_RI.grad, self.pairs[name].B_OR.grad = grad_A, grad_B
        try:
            yield
        finally:
            for pair in self.pairs.values():
                pair.A_RI.grad = pair.B_OR.grad = None
        if self.gradient is not None:
            fresh += self.gradient
        self.gradient = fresh


class Adapters:
    """The adapters by model id."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._adapters

    def get(self, model_id: str) -> Adapter:
        """Raises NotFound when there is no such model here."""
        if model_id not in self._adapters:
            raise NotFound(f"model_id: {model_id!r} is not on this trainer; create it first")
        return self._adapters[model_id]

    def add(self, model_id: str, adapter: Adapter) -> None:
        """Raises InvalidRequest when the model exists."""
        if model_id in self._adapters:
            raise InvalidRequest(f"model_id: {model_id!r} exists; create another model")
        self._adapters[model_id] = adapter

    def put(self, model_id: str, adapter: Adapter) -> None:
        """Make ``adapter`` the model's, whether or not it had one."""
        self._adapters[model_id] = adapter

    def drop(self, model_id: str) -> None:
        """Forget the model; nothing happens when there is none."""
        self._adapters.pop(model_id, None)


def _mixed(seed: int) -> int:
    """64 bits hashed into 32: torch's CPU generator ignores the upper half of its seed."""
    raw = (seed % (1 << 8 * _SEED_BYTES)).to_bytes(_SEED_BYTES, "little")
    return int.from_bytes(blake3(raw).digest(length=4), "little")

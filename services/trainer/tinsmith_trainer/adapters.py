"""Adapters: the tenants that train low-rank factors beside a base that they share."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from tinsmith_trainer.layout import Layout, Part
from tinsmith_trainer.lora import LoraPair, init_factors
from tinsmith_trainer.optim import Moments
from tinsmith_trainer.trainable import Trainable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tinsmith.messages.ops import LoraShape, OptimizerFamily
    from tinsmith_trainer.targets import Target
    from tinsmith_trainer.trainable import Snapshot

_SEED_BYTES = 8


class LoraLayout(Layout):
    """Where each factor lies in the flat array: A then B, target by target.

    Factors of hidden layers are matrices, those of an expert each its own; the unembedding's are
    none, as the unembedding itself is none.
    """

    def __init__(self, targets: Sequence[Target], rank: int) -> None:
        self.targets = tuple(targets)
        """What the array has the factors of, in its order."""
        super().__init__(part for target in targets for part in _parts(target, rank))

    def views(self, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The factors A [r, in] and B [out, r] of each target by its name, as views.

        Those of E experts are [E * r, in] and [out, r * E]; see ``experts``.
        """
        views = self.named(flat)
        return {t.name: (views[f"{t.name}.A"], views[f"{t.name}.B"]) for t in self.targets}


def _parts(target: Target, rank: int) -> tuple[Part, Part]:
    count = max(1, target.experts)
    A = (rank * count, target.in_features)
    B = (target.out_features, rank * count)
    of_A: Callable[[Tensor], Tensor] | None = None
    of_B: Callable[[Tensor], Tensor] | None = None
    if not target.is_unembedding:
        of_A = lambda view: view.view(count, rank, -1)  # noqa: E731
        of_B = lambda view: view.view(-1, rank, count).permute(2, 0, 1)  # noqa: E731
    return Part(f"{target.name}.A", A, of_A), Part(f"{target.name}.B", B, of_B)


class Adapter(Trainable):
    """One model's factors."""

    layout: LoraLayout

    def __init__(
        self, lora: LoraShape, layout: LoraLayout, weights: Tensor, optimizer: Moments
    ) -> None:
        """Takes over ``weights`` and ``optimizer``."""
        super().__init__(lora, layout, weights, optimizer)
        scale = lora.alpha / lora.rank
        self.pairs = {
            name: LoraPair(A_RI.requires_grad_(), B_OR.requires_grad_(), scale)
            for name, (A_RI, B_OR) in self.layout.views(self.weights).items()
        }

    @classmethod
    def fresh(
        cls,
        lora: LoraShape,
        targets: Sequence[Target],
        device: torch.device,
        optimizer: OptimizerFamily = "adamw",
    ) -> Adapter:
        """Factors drawn from the seed in the order of the targets; no steps taken."""
        layout = LoraLayout(targets, lora.rank)
        weights = torch.zeros(layout.size)
        generator = torch.Generator().manual_seed(_mixed(lora.seed))
        for A_RI, B_OR in layout.views(weights).values():
            init_factors(A_RI, B_OR, generator)
        weights = weights.to(device)
        return cls(lora, layout, weights, Moments.fresh(optimizer, weights, layout))

    @classmethod
    def restored(cls, snapshot: Snapshot, device: torch.device) -> Adapter:
        """The adapter that ``snapshot`` was taken of; shares no memory with it."""
        weights = snapshot.weights.to(device, copy=True)
        layout = snapshot.layout
        if not isinstance(layout, LoraLayout):
            msg = "a snapshot of another kind of tenant"
            raise TypeError(msg)
        return cls(snapshot.lora, layout, weights, snapshot.optimizer.copied(device))

    @contextmanager
    def adding_to(self, gradient: Tensor) -> Iterator[None]:
        """The factors' ``grad`` are views of ``gradient`` in the block."""
        for name, (grad_A, grad_B) in self.layout.views(gradient).items():
            self.pairs[name].A_RI.grad, self.pairs[name].B_OR.grad = grad_A, grad_B
        try:
            yield
        finally:
            for pair in self.pairs.values():
                pair.A_RI.grad = pair.B_OR.grad = None


def _mixed(seed: int) -> int:
    """64 bits hashed into 32: torch's CPU generator ignores the upper half of its seed."""
    raw = (seed % (1 << 8 * _SEED_BYTES)).to_bytes(_SEED_BYTES, "little")
    return int.from_bytes(blake3(raw).digest(length=4), "little")

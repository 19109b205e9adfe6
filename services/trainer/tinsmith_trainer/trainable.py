"""What a tenant trains: flat weights with their gradient and optimizer, whatever they stand for.

There are two kinds: the factors of an adapter (``adapters``), and all weights of the base itself
(``whole``). Everything that steps, digests, copies and saves a tenant knows only this much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tinsmith.errors import InvalidRequest, NotFound
from tinsmith_trainer import optim
from tinsmith_trainer.state import StateView

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from tinsmith.messages.ops import LoraShape, OptimStep
    from tinsmith_trainer.layout import Layout
    from tinsmith_trainer.shares import Adder


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a tenant was at one moment, on the CPU: all that a checkpoint holds."""

    base_model: str
    lora: LoraShape
    layout: Layout
    weights: Tensor  # float32 [layout.size]
    optimizer: optim.Moments
    config: Mapping[str, object] | None = None
    """The model's own configuration, of one that is trained whole."""
    dtypes: Mapping[str, str] | None = None
    """What each part of such a model is computed in, by its common name: ``bfloat16`` say."""

    @property
    def step(self) -> int:
        """Optimizer steps behind these weights, counted from when the optimizer was fresh."""
        return self.optimizer.steps


class Trainable(ABC):
    """One model's trainable state."""

    def __init__(
        self, lora: LoraShape, layout: Layout, weights: Tensor, optimizer: optim.Moments
    ) -> None:
        """Takes over ``weights`` and ``optimizer``."""
        self.lora = lora
        self.layout = layout
        self.weights = weights
        self.optimizer = optimizer
        self.gradient: Tensor | None = None
        """What the ops since the last step added up to; None if there were none."""

    norm_block = 0
    """Of how many numbers the blocks are of whose norms that of the gradient is made; 0: of all."""

    @property
    def adder(self) -> Adder | None:
        """What adds the gradients of each pass up, if this rank has but a slice of their sum."""
        return None

    @abstractmethod
    def adding_to(self, gradient: Tensor) -> AbstractContextManager[None]:
        """Let backward passes in the block add to ``gradient``, float32 [layout.size]."""

    @contextmanager
    def collecting(self, *, by_pass: bool = False) -> Iterator[Tensor]:  # noqa: ARG002 - of those with an adder
        """Collect gradients in the block, in what it is given, and add them up at its end.

        A block that fails leaves the accumulated gradient as it was. Whether the sum is one that
        a step can use is decided by the step. With ``by_pass`` and an ``adder``, that one is to be
        called after each pass, and what is given is a slice.
        """
        fresh = torch.zeros_like(self.weights)
        with self.adding_to(fresh):
            yield fresh
        if self.gradient is not None:
            fresh += self.gradient
        self.gradient = fresh

    def step(self, op: OptimStep, norm_block: int) -> float:
        """One step on the accumulated gradient, which is spent; its norm before clipping.

        ``norm_block`` is the model's own, or that of a step which is repeated.

        Raises:
            InvalidRequest: a hyperparameter is out of range, or the step is of another optimizer.
            UnusableGradient: see ``optim.step``.
        """
        if self.gradient is None:
            return 0.0
        return optim.step(
            self.weights,
            self.gradient,
            self.optimizer,
            op,
            self.layout,
            measure=lambda gradient: self.norm_of(gradient, norm_block),
        )

    def norm_of(self, gradient: Tensor, block: int) -> float:
        """See ``optim.norm_of``."""
        return optim.norm_of(gradient, block)

    def view(self) -> StateView:
        """All that its digest is made of."""
        return StateView(self.lora, self.weights, self.optimizer)

    def alike(self) -> Iterable[Tensor]:
        """What is equal on every rank of a trainer."""
        return self.view().tensors()

    @torch.no_grad()
    def snapshot(self, base_model: str, over: Snapshot | None = None) -> Snapshot:
        """Copies of the weights and the optimizer's state, in the memory of ``over`` if given."""
        if over is None:
            cpu = torch.device("cpu")
            weights, moments = self.weights.to(cpu, copy=True), self.optimizer.copied(cpu)
        else:
            weights = over.weights.copy_(self.weights)
            moments = self.optimizer.copied_over(over.optimizer)
        return Snapshot(base_model, self.lora, self.layout, weights, moments)


class Tenants:
    """The tenants by model id."""

    def __init__(self) -> None:
        self._tenants: dict[str, Trainable] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tenants)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._tenants

    def get(self, model_id: str) -> Trainable:
        """Raises NotFound when there is no such model here."""
        if model_id not in self._tenants:
            raise NotFound(f"model_id: {model_id!r} is not on this trainer; create it first")
        return self._tenants[model_id]

    def check_new(self, model_id: str) -> None:
        """Raises InvalidRequest when the model exists."""
        if model_id in self._tenants:
            raise InvalidRequest(f"model_id: {model_id!r} exists; create another model")

    def put(self, model_id: str, tenant: Trainable) -> None:
        """Make ``tenant`` the model's, whether or not it had one."""
        self._tenants[model_id] = tenant

    def drop(self, model_id: str) -> Trainable | None:
        """Forget the model and give it back; None when there is none."""
        return self._tenants.pop(model_id, None)

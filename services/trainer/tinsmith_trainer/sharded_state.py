"""A model that is trained whole, of whose training state each rank holds a slice.

Masters, moments and the accumulated gradient are in slices (``slices``); the weights that are
computed with are whole on every rank, in the dtype of passes. The gradient of a pass is whole on
the rank that made it, in that dtype too, until all passes of a round are through: then each rank
adds the ranks' gradients of its slice to its sum, in their order. A step is made slice by slice,
and the new weights are gathered.

Results, digests and checkpoints have nothing of slices, and logs say what was added in which order.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tinsmith.errors import NotSupported
from tinsmith.messages.ops import WHOLE
from tinsmith_trainer import optim
from tinsmith_trainer.forms import WholeForm
from tinsmith_trainer.optim import Moments
from tinsmith_trainer.slices import Slices
from tinsmith_trainer.state import StateView
from tinsmith_trainer.telling import Telling
from tinsmith_trainer.trainable import Snapshot
from tinsmith_trainer.training_files import read_state
from tinsmith_trainer.whole_model import WholeModel, check_room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from tinsmith.messages.ops import LoraShape, OptimizerFamily, OptimStep
    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.ranks import Ranks
    from tinsmith_trainer.trainable import Trainable
    from tinsmith_trainer.whole_model import Parameters


@dataclass(frozen=True)
class _SlicedView(StateView):
    """Of slices, of which there are others elsewhere."""

    read: Callable[[], Iterable[Tensor]]

    def tensors(self) -> Iterable[Tensor]:
        return self.read()


class SlicedModel(WholeModel):
    """The tenant on one rank: ``weights``, ``gradient`` and ``optimizer`` are its slices."""

    norm_block = optim.NORM_BLOCK

    def __init__(
        self, form: ShardedForm, parameters: Parameters, weights: Tensor, optimizer: Moments
    ) -> None:
        """Takes over the slices; all ranks do so at once, and gather what they compute with."""
        self._ranks, self._slices, self._telling = form.ranks, form.slices, form.telling
        super().__init__(parameters, weights, optimizer)

    @property
    def adder(self) -> SlicedModel:
        """Itself."""
        return self

    @contextmanager
    def collecting(self, *, by_pass: bool = False) -> Iterator[Tensor]:
        """As every tenant's; not ``by_pass``, of an op that is repeated, takes a whole gradient."""
        with self._ranks.in_step():
            fresh = self._slices.zeros()
            size, device = 0 if by_pass else self.layout.size, fresh.device
            whole = torch.zeros(size, device=device)
            apart = self._parameters.zeros_of_output() if by_pass else self.layout.named(whole)
        with self._collecting_in(apart):
            yield fresh if by_pass else whole
        if not by_pass:
            fresh += whole[self._slices.mine]
        if self.gradient is not None:
            fresh += self.gradient
        self.gradient = fresh

    def add_up(self, sums: Tensor) -> None:
        """Add the gradients of the last pass of each rank to ``sums``, a slice."""
        apart = self.collected or {}
        with self._ranks.in_step():
            self._slices.add_up(
                lambda start, row: self._parameters.give_gradients(start, row, apart), sums
            )
            self._parameters.forget_gradients(apart)

    def step(self, op: OptimStep, norm_block: int) -> float:
        """As every tenant's, on all ranks."""
        with self._ranks.in_step():
            return super().step(op, norm_block)

    def norm_of(self, gradient: Tensor, block: int) -> float:
        """Of all slices; without blocks, of a step that is repeated, they are put together."""
        if not block:
            return optim.norm_of(self._slices.whole(gradient))
        mine = optim.block_norms(gradient, block) if len(gradient) else []
        return optim.joined(self._slices.exchange(mine))

    def view(self) -> StateView:
        """Of the first rank: all slices, which are read when they are asked for."""
        return _SlicedView(
            self.lora, self.weights, self.optimizer, lambda: self._telling.read(self)
        )

    def alike(self) -> Iterable[Tensor]:
        """What is computed with."""
        return self._parameters.present()

    def snapshot(self, base_model: str, over: Snapshot | None = None) -> Snapshot:  # noqa: ARG002 - nothing is kept of such models
        """Of the first rank: all slices put together.

        Raises:
            NoRoom: there is not that much memory.
        """
        size, parameters = self.layout.size, self._parameters
        check_room("a copy of", 3 * size * self.weights.element_size())
        state = torch.empty(3 * size)
        start = 0
        for piece in self._telling.read(self):
            state[start : start + len(piece)] = piece
            start += len(piece)
        weights, first, second = torch.split(state, size)
        moments = Moments(first, second, self.optimizer.steps, self.optimizer.family)
        copied = Snapshot(base_model, self.lora, self.layout, weights, moments)
        return replace(copied, config=parameters.config, dtypes=parameters.dtypes)

    def _become(self) -> None:
        self._parameters.stand_alone()
        self._follow()

    def _follow(self) -> None:
        self._slices.spread(self.weights, self._parameters.take)


class ShardedForm(WholeForm):
    """The one tenant of a trainer, with a slice of it on each rank."""

    def __init__(self, base: BaseModel, ranks: Ranks) -> None:
        """Made by all ranks at once."""
        super().__init__(base)
        self.ranks = ranks
        self.slices = Slices(ranks, self._parameters.layout.size, base.device)
        self.telling = Telling(ranks, self.slices)
        self.gradient_bytes = self._parameters.pass_gradient_bytes()

    def fresh(self, lora: LoraShape, optimizer: OptimizerFamily) -> SlicedModel:  # noqa: ARG002 - there is one shape
        """The base as it was loaded.

        Raises:
            NoRoom: there is a tenant already.
            NotSupported: an optimizer that cannot work on slices.
        """
        _check_family(optimizer)
        self._check_free(None)
        with self.ranks.in_step():
            weights = self.slices.zeros()
            self._parameters.give_loaded(self.slices.mine.start, weights)
            return self._placed(weights, Moments.like(weights))

    def from_files(
        self, files: Mapping[str, bytes], *, with_optimizer: bool, optimizer: OptimizerFamily
    ) -> Snapshot:
        """As its base class on the first rank; the others have but what is said beside tensors.

        Raises:
            NotSupported: a state of an optimizer that cannot work on slices.
        """
        if self.ranks.is_first:
            snapshot = super().from_files(files, with_optimizer=with_optimizer, optimizer=optimizer)
        else:
            snapshot = self._outline(files, with_optimizer=with_optimizer, optimizer=optimizer)
        _check_family(snapshot.optimizer.family)
        return snapshot

    def _outline(
        self, files: Mapping[str, bytes], *, with_optimizer: bool, optimizer: OptimizerFamily
    ) -> Snapshot:
        moments = Moments.like(nothing := torch.zeros(0))
        moments.family = optimizer
        if with_optimizer:
            state = read_state(files)
            moments.family, moments.steps = state.optimizer, state.steps
        return Snapshot(self._name, WHOLE, self._parameters.layout, nothing, moments)

    def restored(self, snapshot: Snapshot, *, replacing: Trainable | None) -> SlicedModel:
        """Each rank gets its slice from the first.

        Raises:
            NoRoom: there is another tenant than ``replacing``.
        """
        self._check_free(replacing)
        moments, deal = snapshot.optimizer, self.slices.deal
        with self.ranks.in_step():
            first, second = deal(moments.exp_avg), deal(moments.exp_avg_sq)
            dealt = Moments(first, second, moments.steps, moments.family)
            return self._placed(deal(snapshot.weights), dealt)

    def let_go(self, tenant: Trainable) -> None:
        """As its base class."""
        super().let_go(tenant)
        self.telling.tenant = self._tenant

    def _placed(self, weights: Tensor, moments: Moments) -> SlicedModel:
        tenant = SlicedModel(self, self._parameters, weights, moments)
        self._seated(tenant)
        self.telling.tenant = tenant
        return tenant


def _check_family(family: OptimizerFamily) -> None:
    if family != "adamw":
        raise NotSupported(
            f"optimizer: {family!r} steps whole matrices, and this trainer has slices of them "
            '(trainer.sharding = "weights"); use "adamw", or load the state without its optimizer'
        )

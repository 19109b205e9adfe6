"""What the tenants of one trainer are: adapters on a shared base, or the base itself.

The engine carries out ops on tenants and knows of no difference; it asks its form for tenants and
for passes over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from tinsmith import whole
from tinsmith.errors import NoRoom, NotSupported
from tinsmith.messages.ops import WHOLE, LoraShape
from tinsmith_trainer import checkpoint_files, saved_states, whole_files
from tinsmith_trainer.adapters import Adapter, LoraLayout
from tinsmith_trainer.lora import check_shape
from tinsmith_trainer.optim import Moments
from tinsmith_trainer.passes import Passes
from tinsmith_trainer.whole_model import Parameters, WholeModel, check_room
from tinsmith_trainer.whole_passes import WholePasses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.messages.ops import OptimizerFamily
    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.trainable import Snapshot, Trainable
    from tinsmith_trainer.training_files import TrainerState


_READ_COPIES = 2
"""Of what files hold: tensors as they are in the files, and the state that is made of them."""


class Form(Protocol):
    """One kind of tenants on one loaded model."""

    passes: Any
    """What runs micro-batches of such a tenant, with ``run`` and ``kept_bytes``."""

    gradient_bytes: int
    """What the gradient of a pass takes for as long as the pass lasts, beside the tenant's."""

    def fresh(self, lora: LoraShape, optimizer: OptimizerFamily) -> Trainable:
        """A tenant that was never trained; InvalidRequest for a shape that cannot be."""

    def from_files(
        self, files: Mapping[str, bytes], *, with_optimizer: bool, optimizer: OptimizerFamily
    ) -> Snapshot:
        """What a checkpoint holds; InvalidRequest when it is none of such a tenant."""

    def restored(self, snapshot: Snapshot, *, replacing: Trainable | None) -> Trainable:
        """The tenant that ``snapshot``, which is spent, was taken of."""

    def scratch(self, files: Mapping[str, bytes]) -> Trainable:
        """What passes can be made with, though it is no tenant; InvalidRequest for other files."""

    def let_go(self, tenant: Trainable) -> None:
        """It is no tenant any more."""


def form_of(base: BaseModel) -> Form:
    """The form that the model's name stands for."""
    return WholeForm(base) if whole.is_whole(base.info.name) else AdapterForm(base)


class AdapterForm:
    """Any number of adapters."""

    gradient_bytes = 0

    def __init__(self, base: BaseModel) -> None:
        """Puts adapted layers into ``base.model``."""
        self._device = base.device
        self._name = base.info.name
        self.passes = Passes(base)

    def fresh(self, lora: LoraShape, optimizer: OptimizerFamily) -> Adapter:
        """Equal shapes and seeds give equal weights on any machine."""
        check_shape(lora)
        return Adapter.fresh(lora, self.passes.targets.of(lora), self._device, optimizer)

    def from_files(
        self, files: Mapping[str, bytes], *, with_optimizer: bool, optimizer: OptimizerFamily
    ) -> Snapshot:
        """See ``checkpoint_files``; or ``saved_states``, which have their optimizer."""
        if with_optimizer and saved_states.holds(files):
            return saved_states.read(files, base_model=self._name, blank=self._blank)
        return checkpoint_files.from_files(
            files,
            base_model=self._name,
            targets=self.passes.targets,
            with_optimizer=with_optimizer,
            optimizer=optimizer,
        )

    def _blank(self, state: TrainerState) -> Snapshot:
        check_shape(state.lora)
        layout = LoraLayout(self.passes.targets.of(state.lora), state.rank)
        return saved_states.blank(state, state.lora, layout)

    def restored(self, snapshot: Snapshot, *, replacing: Trainable | None) -> Adapter:  # noqa: ARG002 - of the protocol
        """An adapter beside the others."""
        return Adapter.restored(snapshot, self._device)

    def scratch(self, files: Mapping[str, bytes]) -> Adapter:
        """An adapter without an optimizer; without ``files`` one that adapts nothing."""
        lora, layout, weights = LoraShape(rank=1), LoraLayout((), 1), torch.zeros(0)
        if files:
            read = self.from_files(files, with_optimizer=False, optimizer="adamw")
            if not isinstance(read.layout, LoraLayout):
                msg = "files of another kind of tenant"
                raise TypeError(msg)
            lora, layout, weights = read.lora, read.layout, read.weights
        weights = weights.to(self._device)
        return Adapter(lora, layout, weights, Moments.like(weights[:0]))

    def let_go(self, tenant: Trainable) -> None:
        """Nothing but the engine refers to it."""


class WholeForm:
    """One tenant, which is the model."""

    gradient_bytes = 0

    def __init__(self, base: BaseModel) -> None:
        """Takes over the parameters of ``base.model``."""
        self._device = base.device
        self._name = base.info.name
        self._parameters = Parameters(base)
        self._tenant: Trainable | None = None
        self.passes = WholePasses(base, self._parameters)
        self._parameters.release()

    def fresh(self, lora: LoraShape, optimizer: OptimizerFamily) -> WholeModel:  # noqa: ARG002 - there is one shape
        """The base as it was loaded.

        Raises:
            NoRoom: there is a tenant already.
        """
        self._check_free(None)
        weights = self._parameters.loaded()
        moments = Moments.fresh(optimizer, weights, self._parameters.layout)
        return self._seated(WholeModel(self._parameters, weights, moments))

    def from_files(
        self, files: Mapping[str, bytes], *, with_optimizer: bool, optimizer: OptimizerFamily
    ) -> Snapshot:
        """See ``whole_files``; or ``saved_states``, which have their optimizer.

        Raises:
            NoRoom: there is no memory for them.
        """
        if with_optimizer and saved_states.holds(files):
            check_room("reading", sum(map(len, files.values())))
            return saved_states.read(files, base_model=self._name, blank=self._blank)
        held = [data for name, data in files.items() if with_optimizer or "optim" not in name]
        check_room("reading", _READ_COPIES * sum(map(len, held)))
        return whole_files.from_files(
            files,
            base_model=self._name,
            layout=self._parameters.layout,
            config=self._parameters.config,
            with_optimizer=with_optimizer,
            optimizer=optimizer,
        )

    def _blank(self, state: TrainerState) -> Snapshot:
        return saved_states.blank(state, WHOLE, self._parameters.layout, self._parameters.config)

    def restored(self, snapshot: Snapshot, *, replacing: Trainable | None) -> WholeModel:
        """The snapshot's own arrays where they can be used as they are.

        Raises:
            NoRoom: there is another tenant than ``replacing``.
        """
        self._check_free(replacing)
        weights = snapshot.weights.to(self._device)
        moments = snapshot.optimizer.moved(self._device)
        return self._seated(WholeModel(self._parameters, weights, moments))

    def scratch(self, files: Mapping[str, bytes]) -> WholeModel:
        """Raises NotSupported: there is no room for a second set of weights."""
        raise NotSupported(f"files: {sorted(files)} are a whole model, of which there is one here")

    def let_go(self, tenant: Trainable) -> None:
        """The model is as it was loaded, and the next tenant may come."""
        if self._tenant is tenant:
            self._tenant = None
            self._parameters.release()

    def _seated(self, tenant: WholeModel) -> WholeModel:
        self._tenant = tenant
        return tenant

    def _check_free(self, replacing: Trainable | None) -> None:
        if self._tenant is not replacing:
            raise NoRoom(
                f"base_model: this trainer has all weights of {self._name!r} in training for "
                "another model, and holds one at a time; wait until that is released"
            )

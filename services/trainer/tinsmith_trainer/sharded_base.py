"""A frozen base of which each rank holds a part of every weight, by torch's FSDP2.

The embedding, each decoder layer and the output layer are *units*: a unit is gathered when a pass
computes with it and let go afterwards, by all ranks together. The few weights outside of them, such
as the last norm, are whole on every rank. What is gathered is what was loaded, so that results have
the bits that they have without shards.

All gatherings of a pass are its *round*, in an order that its kind decides alone. Every rank joins
in all of them, whatever it has to compute: one without a pass, or whose pass ended early or failed,
gathers what is left of the round and lets it go again. So no rank waits for one that is through.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tinsmith.errors import StartupError
from tinsmith_trainer.checkpointing import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.ranks import Ranks


def mesh_of(ranks: Ranks, device: torch.device) -> DeviceMesh:
    """All ranks in a row; made by all of them at once.

    Raises:
        StartupError: this torch cannot do what shards need.
    """
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise StartupError(
            f"trainer.sharding: torch {torch.__version__} cannot leave a pass that has failed; "
            'install torch 2.13 or later, or set sharding to "none"'
        )
    return init_device_mesh(device.type, (ranks.size,))


class ShardedBase:
    """The shards of this rank, and the rounds in which they are gathered."""

    def __init__(self, base: BaseModel, ranks: Ranks, mesh: DeviceMesh) -> None:
        """Takes ``base``, which may lie on the host, apart; needs no other rank for it."""
        embedding = base.model.get_input_embeddings()
        self._ranks = ranks
        self._embedding = embedding
        self._unembedding = base.unembedding
        self._is_tied = base.unembedding.weight is embedding.weight
        own_output = [] if self._is_tied else [base.unembedding]
        modules = (embedding, *decoder_layers(base.model), *own_output)
        self._units = [self._unit(number, one, mesh) for number, one in enumerate(modules)]
        self._units[0].set_unshard_in_backward(unshard_in_backward=False)  # it has no gradient
        self._output = 0 if self._is_tied else len(modules) - 1
        layers = range(1, len(modules) - len(own_output))
        self._down = (0, *layers, self._output)
        self._up = tuple(reversed(layers))
        self._due: deque[int] | None = None
        self._root = _root(base.backbone, mesh)
        self._tie()
        self.base = replace(base, device=_device_of(mesh), gathered_output=self._gathered_output)
        """What ``base`` has become."""

    @contextmanager
    def round(self, *, with_gradient: bool) -> Iterator[None]:
        """The gatherings of a pass, of which as many are made in the block as there is need of."""
        self._due = deque((*self._down, *self._up) if with_gradient else self._down)
        try:
            yield
        finally:
            try:
                self._end()
            except Exception as error:  # noqa: BLE001 - others wait in a gathering, for ever
                self._ranks.fail("this rank cannot join in what is gathered", error=repr(error))

    def held_bytes(self) -> int:
        """Of weights that this rank holds between passes."""
        parameters = {id(one): one for one in self.base.model.parameters()}
        return sum(_local(one).nbytes for one in parameters.values())

    def _end(self) -> None:
        """Join in what is left of the round, from whatever state the pass ended in."""
        self._root.reset_iter_state()
        self._tie()
        while self._due:
            unit = self._units[self._due[0]]
            unit.unshard()
            unit.reshard()
        self._due = None

    @contextmanager
    def _gathered_output(self) -> Iterator[None]:
        """The unembedding is whole in the block."""
        unit = self._units[self._output]
        unit.unshard()
        self._tie()
        try:
            yield
        finally:
            unit.reshard()
            self._tie()

    def _tie(self) -> None:
        """FSDP2 exchanges the parameter of the module that it knows; here is the other one."""
        if self._is_tied:
            self._unembedding.weight = self._embedding.weight  # type: ignore[assignment]  # a module's

    def _unit(self, number: int, module: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        unit: FSDPModule = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        unit.set_custom_all_gather(_Gathering(number, self))  # type: ignore[arg-type]  # its type is private
        return unit

    def gather(self, number: int, whole: Tensor, mine: Tensor, group: ProcessGroup) -> None:
        """Of one unit; it must be its turn. Outside of rounds ranks do the same by themselves."""
        if self._due is not None and (not self._due or self._due.popleft() != number):
            self._ranks.fail("a layer was gathered out of its turn", unit=number)
        self._ranks.gather(whole, mine, group)


class _Gathering:
    """FSDP2's way to gather one unit."""

    def __init__(self, number: int, sharded: ShardedBase) -> None:
        self._number = number
        self._sharded = sharded

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002 - FSDP2 asks for what need not wait
    ) -> None:
        self._sharded.gather(self._number, output_tensor, input_tensor, group)


def _root(backbone: nn.Module, mesh: DeviceMesh) -> FSDPModule:
    """By which the units know each other; what is in none of them stays whole."""
    rest = {one for one in backbone.parameters() if not hasattr(one, "device_mesh")}
    root: FSDPModule = fully_shard(backbone, mesh=mesh, ignored_params=rest)
    for one in (*rest, *backbone.buffers()):
        one.data = one.data.to(_device_of(mesh))
    return root


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device(mesh.device_type)


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local

"""Where a served model holds each tensor of its checkpoint, read and written in place.

Linear layers with one input share a product, oneDNN has layouts of its own, experts have a product
each, and tied weights lie in two places. What is read here is read back from all of that: the bits
that passes compute with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from tinsmith.weights.digest import digest
from tinsmith.weights.state import WrongBits
from tinsmith_sampler.experts import DOWN, GATE_UP
from tinsmith_sampler.layouts import integers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from tinsmith.weights.bits import Bits, Indices
    from tinsmith.weights.held import Write
    from tinsmith_sampler.experts import SampledExperts
    from tinsmith_sampler.linear_kernels import FrozenLinear
    from tinsmith_sampler.lora_layers import AdaptedLinear

_AT_ONCE = 1 << 12
"""Elements that are written and read back: what a core's cache holds the surroundings of."""

_NONE = np.empty(0, np.int64)


class Piece(NamedTuple):
    """Some elements of a tensor where they are computed with."""

    memory: torch.Tensor  # integers [m]
    at: torch.Tensor  # int64 [n], where in it they are
    of: slice  # which of the elements that were asked for


class Place(Protocol):
    """One tensor of the model's."""

    @property
    def size(self) -> int:
        """Elements."""

    def read(self) -> torch.Tensor:
        """It, in the checkpoint's shape: itself, or a copy. Contiguous."""

    def write(self, tensor: torch.Tensor) -> None:
        """Compute with ``tensor``, which ``read`` has returned, from now on."""

    def pieces(self, indices: Indices) -> Sequence[Piece] | None:
        """Where its elements at ``indices`` are, which ascend, until all of it is written.

        None: they are to be found by ``read`` alone.
        """


class Alone:
    """A tensor that is held as it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.size = tensor.numel()

    def read(self) -> torch.Tensor:
        """See ``Place``."""
        return self._tensor

    def write(self, tensor: torch.Tensor) -> None:
        """See ``Place``: it is the tensor itself, and written already."""

    def pieces(self, indices: Indices) -> Sequence[Piece]:
        """See ``Place``."""
        return [_piece(integers(self._tensor), indices)]


class Rows:
    """The weight of one of the layers that share a product: rows of a larger one."""

    def __init__(self, kernel: FrozenLinear, first: int, count: int) -> None:
        self._kernel, self._first, self._count = kernel, first, count
        self.size = count * kernel.shape[1]

    def read(self) -> torch.Tensor:
        """See ``Place``."""
        return self._kernel.weight().narrow(0, self._first, self._count)

    def write(self, tensor: torch.Tensor) -> None:
        """See ``Place``."""
        weight = self._kernel.weight()
        rows = weight.narrow(0, self._first, self._count)
        if rows.data_ptr() != tensor.data_ptr():
            rows.copy_(tensor)
        self._kernel.replace(weight)

    def pieces(self, indices: Indices) -> Sequence[Piece] | None:
        """See ``Place``."""
        found = self._kernel.elements(indices, first_row=self._first)
        return None if found is None else [_piece(*found)]


class OfExperts:
    """A matrix of every expert of a layer."""

    def __init__(self, kernels: Sequence[FrozenLinear], *, is_transposed: bool) -> None:
        self._kernels, self._is_transposed = kernels, is_transposed
        outputs, inputs = kernels[0].shape
        self.size = len(kernels) * outputs * inputs

    def read(self) -> torch.Tensor:
        """See ``Place``."""
        weights = torch.stack([kernel.weight() for kernel in self._kernels])
        return weights.transpose(1, 2).contiguous() if self._is_transposed else weights

    def write(self, tensor: torch.Tensor) -> None:
        """See ``Place``."""
        weights = tensor.transpose(1, 2) if self._is_transposed else tensor
        for kernel, weight in zip(self._kernels, weights, strict=True):
            kernel.replace(weight.contiguous())

    def pieces(self, indices: Indices) -> Sequence[Piece] | None:
        """See ``Place``."""
        outputs, inputs = self._kernels[0].shape
        size = outputs * inputs
        bounds = np.searchsorted(indices, np.arange(len(self._kernels) + 1) * size)
        found = []
        for number, kernel in enumerate(self._kernels):
            of = slice(int(bounds[number]), int(bounds[number + 1]))
            at = indices[of] - number * size
            if self._is_transposed:
                at = at % outputs * inputs + at // outputs
            held = kernel.elements(at, first_row=0)
            if held is None:
                return None
            found.append(_piece(*held, of))
        return found


def _piece(memory: torch.Tensor, indices: Indices, of: slice = slice(None)) -> Piece:
    at = torch.from_numpy(np.require(indices, requirements=["C", "W"])).to(memory.device)
    return Piece(memory, at, of)


def names_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter, the checkpoint's first; tied ones have several."""
    found: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(one), []).append(name)
    return tuple(tuple(names) for names in found.values())


def alone(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that stay as they are when layers and experts are replaced."""
    found = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        is_expert = attribute in (GATE_UP, DOWN) and hasattr(module, GATE_UP)
        if not isinstance(module, nn.Linear) and not is_expert:
            found[name] = one.data
    return found


def places(
    names: Iterable[Sequence[str]],
    alone: Mapping[str, torch.Tensor],
    layers: Mapping[str, AdaptedLinear],
    experts: Mapping[str, SampledExperts],
) -> dict[str, tuple[Place, ...]]:
    """Where each tensor lies after layers were replaced, by the first of its ``names``."""

    def place(name: str) -> Place:
        if name in alone:
            return Alone(alone[name])
        owner, _, attribute = name.rpartition(".")
        if owner in experts:
            mixture = experts[owner]
            return OfExperts(mixture.kernels[attribute], is_transposed=mixture.is_transposed)
        # A router's layer has gone into what shows it its rows in blocks.
        return _of_layer(layers.get(owner) or layers[f"{owner}.base"], attribute)

    return {each[0]: tuple(map(place, each)) for each in names}


def _of_layer(layer: AdaptedLinear, attribute: str) -> Place:
    kernel, first, count = layer.product.kernel, layer.first_row, layer.out_features
    if attribute == "bias" and kernel.bias is not None:
        return Alone(kernel.bias.narrow(0, first, count))
    return Rows(kernel, first, count)


class ModelMemory:
    """``tinsmith.weights.memory.StagedMemory`` of a served model."""

    def __init__(
        self,
        places: Mapping[str, Sequence[Place]],
        pause: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self._places = places
        self._staged: list[_Staged] = []
        self.pause = pause
        """While it is entered, nothing is computed and no answer leaves."""

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._places)

    def stage(self, writes: Sequence[Write], digests: Mapping[str, int]) -> None:
        """Find the places of what is to be written; WrongBits if it is not of this model."""
        self._staged = []
        with torch.inference_mode():
            self._staged = [
                _Staged(write, place, digests.get(write.name))
                for write in writes
                for place in self._places.get(write.name) or _unknown(write.name)
            ]

    def swap(self) -> None:
        """Write what was staged, and prove it.

        Raises:
            WrongBits: a place does not hold what was written to it.
        """
        staged, self._staged = self._staged, []
        with torch.inference_mode():
            for one in staged:
                one.write()
            for one in staged:  # not before: tensors that share a product are laid out together
                one.prove()

    def digest(self, name: str) -> int:
        """Of the whole tensor; WrongBits where tied tensors differ."""
        first, *others = [digest(name, bits) for bits in self._bits(name)]
        if any(first != other for other in others):
            raise WrongBits(f"the engine's {name!r} is tied, and its places hold different bits")
        return first

    def _bits(self, name: str) -> Iterator[Bits]:
        """What each place of a tensor holds, flat."""
        with torch.inference_mode():
            for place in self._places[name]:
                yield _held(place)


class _Staged:
    """What is to be written to one place."""

    def __init__(self, write: Write, place: Place, digest: int | None) -> None:
        """``digest``: of the whole tensor, where all of it is written."""
        self._name, self._place, self._digest = write.name, place, digest
        self._check(write)
        # Layouts are found out when all of it is written, so that no later change waits for it.
        found = place.pieces(_NONE if write.indices is None else write.indices)
        self._pieces = None if write.indices is None else found
        held = found[0].memory if found else integers(place.read())
        if write.values.itemsize != held.itemsize:
            raise WrongBits(
                f"{write.name!r}: the lineage's elements have {write.values.itemsize} bytes, the "
                f"engine's {held.itemsize}; serve the model in the dtype that it is trained in"
            )
        signed = np.require(write.values.view(f"i{held.itemsize}"), requirements=["C", "W"])
        self._values = torch.from_numpy(signed).to(held.device)
        self._at = None if write.indices is None else _piece(held, write.indices).at

    def write(self) -> None:
        """Write it, and read back single elements."""
        if self._pieces is None:
            self._write_all()
            return
        for piece in self._pieces:
            step = _AT_ONCE if piece.memory.device.type == "cpu" else len(piece.at) or 1
            values = self._values[piece.of]
            for at, some in zip(
                torch.split(piece.at, step), torch.split(values, step), strict=True
            ):
                piece.memory.scatter_(0, at, some)
                if not torch.equal(piece.memory.gather(0, at), some):
                    self._fail()

    def prove(self) -> None:
        """Digest a tensor that was written whole."""
        if self._at is None and digest(self._name, _held(self._place)) != self._digest:
            self._fail()

    def _write_all(self) -> None:
        tensor = self._place.read()
        if self._at is None:
            integers(tensor).copy_(self._values)
            self._place.write(tensor)
            return
        integers(tensor).scatter_(0, self._at, self._values)
        self._place.write(tensor)
        if not torch.equal(integers(self._place.read()).gather(0, self._at), self._values):
            self._fail()

    def _check(self, write: Write) -> None:
        size, indices = self._place.size, write.indices
        is_fit = write.values.size == (size if indices is None else indices.size)
        if is_fit and indices is not None and indices.size:
            is_fit = int(indices.min()) >= 0 and int(indices.max()) < size
        if not is_fit:
            raise WrongBits(
                f"the engine's {write.name!r} has {size} elements, the lineage's others"
            )

    def _fail(self) -> None:
        raise WrongBits(f"the engine's {self._name!r} does not hold what was written to it")


def _held(place: Place) -> Bits:
    """What is there, flat."""
    held = integers(place.read()).cpu().numpy()
    return held.view(f"u{held.itemsize}")


def _unknown(name: str) -> Sequence[Place]:
    raise WrongBits(f"the engine has no {name!r}")

"""Where a served model holds each tensor of its checkpoint, read and written in place.

Linear layers with one input share a product, oneDNN has layouts of its own, experts have a product
each, and tied weights lie in two places. What is read here is read back from all of that: the bits
that passes compute with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from tinsmith.weights.digest import digest
from tinsmith.weights.state import WrongBits
from tinsmith_sampler.experts import DOWN, GATE_UP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from tinsmith.weights.bits import Bits, Indices
    from tinsmith_sampler.experts import SampledExperts
    from tinsmith_sampler.linear_kernels import FrozenLinear
    from tinsmith_sampler.lora_layers import AdaptedLinear

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""By bytes of an element: torch has few operations on unsigned numbers."""


class Place(Protocol):
    """One tensor of the model's."""

    def read(self) -> torch.Tensor:
        """It, in the checkpoint's shape: itself, or a copy. Contiguous."""

    def write(self, tensor: torch.Tensor) -> None:
        """Compute with ``tensor``, which ``read`` has returned, from now on."""


class Alone:
    """A tensor that is held as it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def read(self) -> torch.Tensor:
        """See ``Place``."""
        return self._tensor

    def write(self, tensor: torch.Tensor) -> None:
        """See ``Place``: it is the tensor itself, and written already."""


class Rows:
    """The weight of one of the layers that share a product: rows of a larger one."""

    def __init__(self, kernel: FrozenLinear, first: int, count: int) -> None:
        self._kernel, self._first, self._count = kernel, first, count

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


class OfExperts:
    """A matrix of every expert of a layer."""

    def __init__(self, kernels: Sequence[FrozenLinear], *, is_transposed: bool) -> None:
        self._kernels, self._is_transposed = kernels, is_transposed

    def read(self) -> torch.Tensor:
        """See ``Place``."""
        weights = torch.stack([kernel.weight() for kernel in self._kernels])
        return weights.transpose(1, 2).contiguous() if self._is_transposed else weights

    def write(self, tensor: torch.Tensor) -> None:
        """See ``Place``."""
        weights = tensor.transpose(1, 2) if self._is_transposed else tensor
        for kernel, weight in zip(self._kernels, weights, strict=True):
            kernel.replace(weight.contiguous())


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
    """``tinsmith.weights.memory.EngineMemory`` of a served model."""

    def __init__(
        self,
        places: Mapping[str, Sequence[Place]],
        pause: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self._places = places
        self.pause = pause
        """While it is entered, nothing is computed and no answer leaves."""

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._places)

    def write(self, name: str, values: Bits, indices: Indices | None) -> None:
        """Set the elements at ``indices``, or all of them; ValueError for bits of another type."""
        with torch.inference_mode():
            for place in self._places[name]:
                tensor = place.read()
                _set(_as_integers(tensor), values, indices)
                place.write(tensor)

    def read(self, name: str, indices: Indices) -> Bits:
        """The elements at ``indices``; WrongBits where tied tensors differ in them."""
        first, *others = [bits[indices] for bits in self._bits(name)]
        if not all(np.array_equal(first, other) for other in others):
            raise WrongBits(f"the engine's {name!r} is tied, and its places hold different bits")
        return first

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
                integers = _as_integers(place.read()).cpu().numpy()
                yield integers.view(f"u{integers.itemsize}")


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, flat; a view."""
    return tensor.view(-1).view(_INTEGERS[tensor.itemsize])


def _set(integers: torch.Tensor, values: Bits, indices: Indices | None) -> None:
    if values.itemsize != integers.itemsize:
        raise ValueError(
            f"the lineage's elements have {values.itemsize} bytes, the engine's "
            f"{integers.itemsize}; serve the model in the dtype that it is trained in"
        )
    signed = np.require(values.view(f"i{values.itemsize}"), requirements=["C", "W"])
    source = torch.from_numpy(signed).to(integers.device)
    if indices is None:
        integers.copy_(source)
    else:
        at = np.require(indices, requirements=["C", "W"])
        integers[torch.from_numpy(at).to(integers.device)] = source

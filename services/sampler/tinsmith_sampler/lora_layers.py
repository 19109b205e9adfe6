"""The linear layers of a served model: the frozen base, plus the LoRA delta of each row's adapter.

A pass may hold rows of several adapters and of none. Rows of one adapter lie side by side, so a
delta is a product on a slice; it is padded like a pass, so that its bits do not depend on company.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from tinsmith_sampler.linear_kernels import FrozenLinear, pad_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that get the same input, as the models of Hugging Face name them."""


class LayerShape(NamedTuple):
    """What an adapter may change: a linear layer, or one parameter of all experts of a layer."""

    inputs: int
    outputs: int
    experts: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class LoraDelta:
    """B(A(x)) of one layer; the scale is folded into B."""

    down: FrozenLinear
    up: FrozenLinear

    def __call__(self, x: torch.Tensor, height: int) -> torch.Tensor:
        """The delta for x [1, n, in], computed on at least ``height`` rows."""
        return self.up(self.down(pad_rows(x, height))).narrow(1, 0, x.shape[1])


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """Immutable LoRA weights, by the name of the layer that they change."""

    version: str
    deltas: Mapping[str, LoraDelta]
    expert_deltas: Mapping[str, tuple[LoraDelta, ...]] = field(default_factory=dict)
    """Of every expert, by the name that PEFT has for the parameter."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Adjacent rows of a pass that have the same adapter."""

    first: int
    end: int
    adapter: Adapter

    def clipped(self, first: int, end: int) -> RowGroup:
        """The part of the group inside these rows, counted from ``first``; may be empty."""
        return RowGroup(max(self.first, first) - first, min(self.end, end) - first, self.adapter)


def group_rows(counts: Iterable[tuple[int, Adapter | None]]) -> tuple[RowGroup, ...]:
    """The groups of a pass made of stretches (rows, adapter), in this order."""
    groups: list[RowGroup] = []
    row = 0
    for count, adapter in counts:
        end = row + count
        if adapter is not None and count:
            joins = bool(groups) and groups[-1].adapter is adapter and groups[-1].end == row
            first = groups.pop().first if joins else row
            groups.append(RowGroup(first, end, adapter))
        row = end
    return tuple(groups)


@dataclass(eq=False, slots=True)
class ActiveAdapters:
    """Which rows of the pass now running have which adapter; all layers of a model share one."""

    groups: Sequence[RowGroup] = ()
    height: int = 1  # rows that a delta is padded to
    rows: int = 0  # of the pass, without those that pad it


class SharedProduct:
    """One product for several layers with the same input, computed for the first that asks.

    Half as many, larger products: in a decoding pass each call costs about as much as it computes.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if _has_bias(layer)]
        self.kernel = FrozenLinear(weight, torch.cat(biases) if biases else None)
        self._widths = [layer.out_features for layer in layers]
        self.firsts = [sum(self._widths[:index]) for index in range(len(layers))]
        """Of each layer, the first row of the weight that is its own."""
        self._input: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The output of layer ``index`` for x [1, n, in]."""
        if len(self._widths) == 1:
            return self.kernel(x)
        if x is not self._input:
            self._input, self._outputs = x, torch.split_with_sizes(self.kernel(x), self._widths, -1)
        output = self._outputs[index]
        if index == len(self._widths) - 1:
            self._input, self._outputs = None, ()  # nobody else will ask: let the memory go
        return output


class AdaptedLinear(nn.Module):
    """Stands where a linear layer stood: part ``index`` of a product."""

    def __init__(
        self,
        name: str,
        base: nn.Linear,
        product: SharedProduct,
        *,
        index: int,
        active: ActiveAdapters,
    ) -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features = base.in_features, base.out_features
        self.product = product
        self.first_row = product.firsts[index]
        self._index = index
        self._active = active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Linear map of x [1, n, in], each row with its own adapter."""
        y = self.product.part(self._index, x)
        for group in self._active.groups:
            delta = group.adapter.deltas.get(self.name)
            if delta is not None:
                rows = slice(group.first, group.end)
                y[:, rows] += delta(x[:, rows], self._active.height)
        return y


def install(model: nn.Module, active: ActiveAdapters) -> dict[str, AdaptedLinear]:
    """Put an AdaptedLinear in the place of every linear layer; returns them by name.

    The old weights are let go group by group, so that memory never holds the model twice.
    """
    installed = {}
    for names in list(_groups(model)):
        layers = [cast("nn.Linear", model.get_submodule(name)) for name in names]
        product = SharedProduct(layers)
        for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
            parent, _, attribute = name.rpartition(".")
            installed[name] = AdaptedLinear(name, layer, product, index=index, active=active)
            setattr(model.get_submodule(parent), attribute, installed[name])
    return installed


def _groups(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """The names of all linear layers, those that share a product together."""
    linear = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    while linear:
        names = _family(next(iter(linear)), linear)
        for name in names:
            del linear[name]
        yield names


def _family(name: str, linear: Mapping[str, nn.Linear]) -> tuple[str, ...]:
    """The layers that share a product with this one, itself among them."""
    parent, dot, attribute = name.rpartition(".")
    for attributes in _SIBLINGS:
        names = tuple(parent + dot + one for one in attributes)
        if attribute in attributes and all(one in linear for one in names):
            kinds = {(linear[one].in_features, _has_bias(linear[one])) for one in names}
            return names if len(kinds) == 1 else (name,)
    return (name,)


def _has_bias(layer: nn.Linear) -> bool:
    return cast("torch.Tensor | None", layer.bias) is not None

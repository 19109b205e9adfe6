"""The experts of a mixture in a served model: frozen products, plus each row's own adapter.

Every expert multiplies only the rows that its router sent to it, padded like any other product
of the pass, and a row adds up its experts in the order of their numbers: so its bits do not
depend on company here either. The router runs in blocks of one height for the same reason.

T = rows of a pass, K = experts of a row, n = rows of one expert.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tinsmith_sampler.engine import expert_width
from tinsmith_sampler.linear_kernels import BLOCK, FrozenLinear, pad_rows
from tinsmith_sampler.lora_layers import LayerShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tinsmith_sampler.engine import Experts
    from tinsmith_sampler.kv_cache import Extent, KvCache
    from tinsmith_sampler.lora_layers import ActiveAdapters

GATE_UP, DOWN = "gate_up_proj", "down_proj"


class Routes:
    """Which experts the tokens in a cache were sent to, by its slots."""

    def __init__(self, cache: KvCache, mixtures: Iterable[SampledExperts]) -> None:
        """``mixtures`` are all that send tokens, in the order of the layers."""
        self._cache = cache
        self._mixtures = list(mixtures)
        most = max((mixture.count for mixture in self._mixtures), default=0)
        self._dtype = {1: torch.uint8, 2: torch.int16}[expert_width(most)]
        self._routes: torch.Tensor | None = None  # [slot, layer, K], from a first pass on
        self.slots = torch.empty(0, dtype=torch.int64)  # [T], of the pass that now runs
        for layer, mixture in enumerate(self._mixtures):
            mixture.note = partial(self._note, layer)

    def token_bytes(self, k: int) -> int:
        """What is told of one token that each layer sends to ``k`` experts."""
        return len(self._mixtures) * k * self._dtype.itemsize

    def of(self, extent: Extent, tokens: int) -> Experts | None:
        """Of the first tokens of a stretch; None if there are no experts."""
        if self._routes is None:
            return None
        found = self._routes.narrow(0, extent.start, tokens).to("cpu", copy=True).numpy()
        return found.view(f"u{found.itemsize}")

    def _note(self, layer: int, experts_TK: torch.Tensor) -> None:
        if self._routes is None:
            shape = len(self._mixtures), experts_TK.shape[1]
            self._routes = self._cache.beside(shape, self._dtype)
        self._routes[self.slots, layer] = experts_TK.to(self._routes.dtype)


class SampledExperts(nn.Module):
    """Stands where a module of experts stood."""

    def __init__(self, name: str, base: nn.Module, active: ActiveAdapters) -> None:
        super().__init__()
        # PEFT wraps the module once for each parameter; the inner wrapper is of gate_up_proj.
        self.names = {GATE_UP: f"{name}.base_layer", DOWN: name}
        self.kernels = {matrix: list(_kernels(base, matrix)) for matrix in self.names}
        self.shapes = {self.names[matrix]: _shape(base, matrix) for matrix in self.names}
        self.is_transposed = bool(base.is_transposed)  # in the checkpoint
        for matrix in self.names:
            delattr(base, matrix)  # the kernels have copies
        self._gate: Any = base._apply_gate  # noqa: SLF001
        self._active = active
        self.count = len(self.kernels[DOWN])
        self.note: Callable[[torch.Tensor], None] | None = None  # is told where rows are sent

    def forward(
        self, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """What the chosen experts make of each row, weighted: [T, hidden]."""
        out_TH = torch.zeros_like(x_TH)
        if self.note is not None:
            self.note(experts_TK)
        experts_TK = experts_TK[: self._active.rows]  # nobody looks at what pads the pass
        for expert in sorted(set(experts_TK.flatten().tolist())):
            rows_n, choice_n = torch.where(experts_TK == expert)
            inner = self._gate(self._product(GATE_UP, expert, x_TH[rows_n], rows_n))
            y = self._product(DOWN, expert, inner, rows_n) * weights_TK[rows_n, choice_n, None]
            out_TH[rows_n] += y.to(out_TH.dtype)
        return out_TH

    def _product(
        self, matrix: str, expert: int, x: torch.Tensor, rows_n: torch.Tensor
    ) -> torch.Tensor:
        """[n, in] -> [n, out]; ``rows_n`` are rows of the pass, ascending."""
        kernel = self.kernels[matrix][expert]
        y = kernel(pad_rows(x[None], self._active.height)).narrow(1, 0, len(x))
        for group in self._active.groups:
            deltas = group.adapter.expert_deltas.get(self.names[matrix])
            if deltas is None:
                continue
            ends = rows_n.new_tensor((group.first, group.end))
            first, end = torch.searchsorted(rows_n, ends).tolist()
            if first < end:
                part = x[None, first:end]
                y[:, first:end] += deltas[expert](part, self._active.height)
        return y[0]


class BlockRouter(nn.Module):
    """A router that always sees the same number of rows."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the router returns for [T, hidden], in blocks."""
        rows = x_TH.reshape(-1, x_TH.shape[-1])
        blocks = [self.base(pad_rows(block[None], BLOCK)[0]) for block in torch.split(rows, BLOCK)]
        return tuple(torch.cat(parts)[: len(rows)] for parts in zip(*blocks, strict=True))


def install(model: nn.Module, active: ActiveAdapters) -> Mapping[str, SampledExperts]:
    """Put SampledExperts and BlockRouters in their places; the experts by their modules' names."""
    installed = {}
    for name, module in list(model.named_modules()):
        if isinstance(getattr(module, GATE_UP, None), nn.Parameter):
            installed[name] = SampledExperts(name, module, active)
            model.set_submodule(name, installed[name])
            _block_router(model.get_submodule(name.rpartition(".")[0]))
    return installed


def _block_router(mixture: nn.Module) -> None:
    """Of a layer with experts; families call it ``gate`` or ``router``."""
    for name in ("gate", "router"):
        if isinstance(router := getattr(mixture, name, None), nn.Module):
            setattr(mixture, name, BlockRouter(router))


def _weights(base: Any, matrix: str) -> torch.Tensor:  # noqa: ANN401 - any family's module
    """[experts, out, in]."""
    weight: torch.Tensor = getattr(base, matrix).detach()
    return weight.transpose(1, 2) if base.is_transposed else weight


def _kernels(base: Any, matrix: str) -> Iterator[FrozenLinear]:  # noqa: ANN401
    biases = getattr(base, f"{matrix}_bias").detach() if base.has_bias else None
    for expert, weight in enumerate(_weights(base, matrix)):
        bias = None if biases is None else biases[expert].contiguous()
        yield FrozenLinear(weight.contiguous(), bias)


def _shape(base: Any, matrix: str) -> LayerShape:  # noqa: ANN401
    experts, outputs, inputs = _weights(base, matrix).shape
    return LayerShape(inputs, outputs, experts)

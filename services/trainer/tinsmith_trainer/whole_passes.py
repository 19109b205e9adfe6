"""Passes over a model that is trained whole.

Shapes: B rows, T tokens of the longest row, G tokens of a chunk with a gradient, H hidden,
V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from tinsmith_trainer.head import OutputHead
from tinsmith_trainer.kept import addresses, kept_storages
from tinsmith_trainer.microbatch import MicroBatch
from tinsmith_trainer.parts import Made

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.head import _LowRank
    from tinsmith_trainer.parts import Outcome, Part
    from tinsmith_trainer.whole_model import Parameters, WholeModel


class TrainedHead(OutputHead):
    """The unembedding of a model that is trained whole: it has a gradient of its own."""

    def __init__(self, linear: nn.Linear, parameters: Parameters, softcap: float | None) -> None:
        super().__init__(linear, softcap=softcap)
        self._parameters = parameters
        self._grads: tuple[Tensor, Tensor | None] | None = None

    @contextmanager
    def adding_to(self, gradients: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Let backward passes in the block add to ``gradients``, float32, if there are any."""
        if gradients is not None:
            bias: Tensor | None = self._linear.bias
            name_of = self._parameters.name_of
            self._grads = (
                gradients[name_of(self._linear.weight)],
                None if bias is None else gradients[name_of(bias)],
            )
        try:
            yield
        finally:
            self._grads = None

    def _backward(self, h_GH: Tensor, low_rank: _LowRank | None, grad_GV: Tensor) -> Tensor:
        if self._grads is not None:
            weight_VH, bias_V = self._grads
            if grad_GV.dtype == weight_VH.dtype:
                weight_VH.addmm_(grad_GV.T, h_GH)
            else:
                weight_VH.add_(grad_GV.T @ h_GH)
            if bias_V is not None:
                bias_V.add_(grad_GV.sum(dim=0))
        return super()._backward(h_GH, low_rank, grad_GV)


class WholePasses:
    """Runs micro-batches through the model of the one tenant."""

    def __init__(self, base: BaseModel, parameters: Parameters) -> None:
        self._base = base
        self._parameters = parameters
        self._head = TrainedHead(base.unembedding, parameters, base.softcap)

    def run(self, parts: Sequence[Part]) -> list[Outcome]:
        """Score the rows of the one part; gradients go to where the tenant collects them."""
        (part,) = parts
        tenant, with_gradient = cast("WholeModel", part.tenant), part.with_gradient
        batch = MicroBatch(part.rows, part.loss, part.settings, self._base.device)
        ids_BT, real_BT = batch.padded(part.longest)
        with torch.set_grad_enabled(with_gradient):
            output = self._base.backbone(input_ids=ids_BT, use_cache=False)
        hidden_BTH: Tensor = output.last_hidden_state
        with self._head.adding_to(tenant.collected if with_gradient else None):
            scores = self._head.score(
                hidden_BTH.detach()[real_BT],
                batch.targets_NK,
                batch.terms,
                None,
                with_gradient=with_gradient,
                prepare=batch.prepare,
            )
        if scores.grad_hidden is not None and scores.grad_hidden.any():
            grad_BTH = torch.zeros_like(hidden_BTH)
            grad_BTH[real_BT] = scores.grad_hidden
            hidden_BTH.backward(grad_BTH)  # type: ignore[no-untyped-call]
        return [Made(batch.split(scores), None)]

    def kept_bytes(self, tokens: int) -> int:
        """What autograd keeps of a pass over ``tokens``, with every weight trained."""
        ids_BT = torch.zeros((1, tokens), dtype=torch.int64, device=self._base.device)
        with self._parameters.trial(), kept_storages() as kept:
            self._base.backbone(input_ids=ids_BT, use_cache=False)
            weights = addresses(self._base.model.parameters())
        return sum(size for pointer, size in kept.items() if pointer not in weights)

"""One pass over the model: a micro-batch in, scores out, gradients added to the adapter's.

Shapes: B rows, T tokens of the longest row, N real tokens of all rows, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tinsmith.messages.ops import LoraShape
from tinsmith_trainer.adapters import Adapter
from tinsmith_trainer.head import OutputHead
from tinsmith_trainer.lora import ActiveAdapter
from tinsmith_trainer.microbatch import MicroBatch
from tinsmith_trainer.targets import inject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.loss import Loss
    from tinsmith_trainer.microbatch import Scored


class Passes:
    """Runs micro-batches through the base with one adapter at a time."""

    def __init__(self, base: BaseModel) -> None:
        """Puts adapted layers into ``base.model``, once and for all adapters."""
        self._base = base
        self._active = ActiveAdapter()
        self.targets = inject(base.model, self._active)
        self._head = OutputHead(base.unembedding, softcap=base.softcap)

    def run(
        self,
        adapter: Adapter,
        rows: Sequence[Example],
        loss: Loss,
        settings: Mapping[str, float],
        *,
        with_gradient: bool,
    ) -> list[Scored]:
        """Score ``rows``; gradients go to ``grad`` of the adapter's factors."""
        batch = MicroBatch(rows, loss, settings, self._base.device)
        ids_BT, real_BT = batch.padded()
        with self._active.use(adapter.pairs):  # to the end: layers may be computed twice
            with torch.set_grad_enabled(with_gradient):
                output = self._base.backbone(input_ids=ids_BT, use_cache=False)
            hidden_BTH: Tensor = output.last_hidden_state
            scores = self._head.score(
                hidden_BTH.detach()[real_BT],
                batch.targets_NK,
                batch.terms,
                adapter.pairs.get(self.targets.unembed.name),
                with_gradient=with_gradient,
                prepare=batch.prepare,
            )
            if hidden_BTH.requires_grad and scores.grad_hidden is not None:
                _backward(hidden_BTH, real_BT, scores.grad_hidden)
        return batch.split(scores)

    def kept_bytes(self, tokens: int) -> int:
        """What autograd keeps of a pass over ``tokens``, with every matrix adapted."""
        shape = LoraShape(rank=1)
        adapter = Adapter.fresh(shape, self.targets.of(shape), self._base.device)
        weights = {p.untyped_storage().data_ptr() for p in self._base.model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids_BT = torch.zeros((1, tokens), dtype=torch.int64, device=self._base.device)
        with self._active.use(adapter.pairs), saved_tensors_hooks(keep, lambda tensor: tensor):
            self._base.backbone(input_ids=ids_BT, use_cache=False)
        weights.add(adapter.weights.untyped_storage().data_ptr())
        return sum(size for pointer, size in kept.items() if pointer not in weights)


def _backward(hidden_BTH: Tensor, real_BT: Tensor, grad_NH: Tensor) -> None:
    """From the last hidden states down; rows without any gradient cost nothing."""
    if grad_NH.any():
        grad_BTH = torch.zeros_like(hidden_BTH)
        grad_BTH[real_BT] = grad_NH
        hidden_BTH.backward(grad_BTH)  # type: ignore[no-untyped-call]

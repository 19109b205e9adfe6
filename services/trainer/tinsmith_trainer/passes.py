"""One pass over the model: a micro-batch in, scores out, gradients added to the adapter's.

Rows are padded on the right and attention is causal, so no real token ever sees padding: there is
no mask to build and no mask to get wrong. Padding is neither scored nor given a gradient.

Shapes: B rows, T tokens of the longest row, N real tokens of all rows, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith_trainer.head import OutputHead
from tinsmith_trainer.lora import ActiveAdapter, inject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tinsmith_trainer.adapters import Adapter
    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.losses import Loss, Terms

_PAD = 0  # any id does


class Scored(NamedTuple):
    """A row's results, both float32 of the row's length."""

    logprobs: NDArray[np.float32]
    values: NDArray[np.float32]  # the terms of the loss


class Passes:
    """Runs micro-batches through the base with one adapter at a time."""

    def __init__(self, base: BaseModel) -> None:
        """Puts adapted layers into ``base.model``, once and for all adapters."""
        self._base = base
        self._active = ActiveAdapter()
        self.targets = inject(base.model, self._active)
        self._head = OutputHead(base.unembedding)

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
        ids_BT, real_BT = self._padded(rows)
        targets_N = self._joined([row.targets for row in rows])
        inputs_N = {key: self._joined([row.inputs[key] for row in rows]) for key in loss.inputs}

        def terms(chunk: slice, logprobs_C: Tensor) -> Terms:
            inputs_C = {key: values_N[chunk] for key, values_N in inputs_N.items()}
            return loss.terms(logprobs_C, inputs_C, settings)

        with torch.set_grad_enabled(with_gradient), self._active.use(adapter.pairs):
            output = self._base.backbone(input_ids=ids_BT, use_cache=False)
        hidden_BTH: Tensor = output.last_hidden_state
        scores = self._head.score(
            hidden_BTH.detach()[real_BT],
            targets_N,
            terms,
            adapter.pairs.get(self.targets.unembed.name),
            with_gradient=with_gradient,
        )
        if hidden_BTH.requires_grad and scores.grad_hidden is not None:
            _backward(hidden_BTH, real_BT, scores.grad_hidden)
        return _split(rows, scores.logprobs, scores.values)

    def _padded(self, rows: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Token ids int64 [B, T], and where they are real, bool [B, T]."""
        longest = max(map(len, rows))
        ids_BT = np.full((len(rows), longest), _PAD, dtype=np.int64)
        real_BT = np.zeros((len(rows), longest), dtype=np.bool_)
        for b, row in enumerate(rows):
            ids_BT[b, : len(row)] = row.tokens
            real_BT[b, : len(row)] = True
        return self._on_device(ids_BT), self._on_device(real_BT)

    def _joined(self, arrays: Sequence[NDArray[np.generic]]) -> Tensor:
        return self._on_device(np.concatenate(arrays))

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._base.device)


def _backward(hidden_BTH: Tensor, real_BT: Tensor, grad_NH: Tensor) -> None:
    """From the last hidden states down; rows without any gradient cost nothing."""
    if grad_NH.any():
        grad_BTH = torch.zeros_like(hidden_BTH)
        grad_BTH[real_BT] = grad_NH
        hidden_BTH.backward(grad_BTH)  # type: ignore[no-untyped-call]


def _split(rows: Sequence[Example], logprobs_N: Tensor, values_N: Tensor) -> list[Scored]:
    ends = np.cumsum([len(row) for row in rows])[:-1]
    logprobs = np.split(logprobs_N.cpu().numpy(), ends)
    values = np.split(values_N.cpu().numpy(), ends)
    return [Scored(*row) for row in zip(logprobs, values, strict=True)]

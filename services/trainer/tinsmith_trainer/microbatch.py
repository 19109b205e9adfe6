"""A micro-batch as tensors: token ids padded into rows, and what the loss is made of.

Rows are padded on the right and attention is causal, so no real token ever sees padding: there is
no mask to build and no mask to get wrong. Padding is neither scored nor given a gradient. Rows
with fewer targets per position than others have further ones whose terms and slopes are zero.

Shapes: B rows, T tokens of the longest row, N real tokens of all rows, K targets per position of
the widest row, C tokens of a chunk, n tokens of one row, k its targets per position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tinsmith_trainer.loss import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.head import Scores
    from tinsmith_trainer.loss import Loss, Preparation

PAD = 0  # any id does


class Scored(NamedTuple):
    """A row's results, both float32 of its targets' shape."""

    logprobs: NDArray[np.float32]
    values: NDArray[np.float32]  # the terms of the loss


class MicroBatch:
    """Rows that share a pass, and their loss."""

    def __init__(
        self,
        rows: Sequence[Example],
        loss: Loss,
        settings: Mapping[str, float],
        device: torch.device,
    ) -> None:
        self._rows = rows
        self._loss = loss
        self._settings = settings
        self._device = device
        self._width = max(_width(row) for row in rows)
        self._is_ragged = any(_width(row) < self._width for row in rows)
        self.targets_NK = self._joined([row.targets for row in rows])
        keys = rows[0].inputs
        self._inputs = {key: self._joined([row.inputs[key] for row in rows]) for key in keys}
        if self._is_ragged:
            self._real_NK = self._joined([np.ones(row.targets.shape, np.bool_) for row in rows])

    def padded(self, length: int) -> tuple[Tensor, Tensor]:
        """Token ids int64 [B, T] of T = ``length``, and where they are real, bool [B, T]."""
        ids_BT = np.full((len(self._rows), length), PAD, dtype=np.int64)
        real_BT = np.zeros((len(self._rows), length), dtype=np.bool_)
        for b, row in enumerate(self._rows):
            ids_BT[b, : len(row)] = row.tokens
            real_BT[b, : len(row)] = True
        return self._on_device(ids_BT), self._on_device(real_BT)

    @property
    def prepare(self) -> Callable[[Tensor], None] | None:
        """Takes the log-probabilities [N, K] of a loss that needs all of a datum's at once."""
        make = self._loss.prepare
        return None if make is None else lambda logprobs_NK: self._prepare(make, logprobs_NK)

    def terms(self, chunk: slice, logprobs_CK: Tensor) -> Terms:
        """The loss of a range of tokens, float32 [C, K]."""
        inputs = {key: values_NK[chunk] for key, values_NK in self._inputs.items()}
        terms = self._loss.terms(logprobs_CK, inputs, self._settings)
        if not self._is_ragged:
            return terms
        real_CK = self._real_NK[chunk]
        return Terms(*(term.masked_fill(~real_CK, 0.0) for term in terms))

    def split(self, scores: Scores) -> list[Scored]:
        """The results by row."""
        logprobs_NK, values_NK = scores.logprobs.cpu().numpy(), scores.values.cpu().numpy()
        return [
            Scored(
                np.ascontiguousarray(logprobs_NK[where]).reshape(row.targets.shape),
                np.ascontiguousarray(values_NK[where]).reshape(row.targets.shape),
            )
            for row, where in self._places()
        ]

    def _prepare(self, make: Preparation, logprobs_NK: Tensor) -> None:
        sent = dict(self._inputs)
        for row, where in self._places():
            shape = row.targets.shape
            inputs = {key: values_NK[where].reshape(shape) for key, values_NK in sent.items()}
            inputs |= {key: self._on_device(values) for key, values in row.extras.items()}
            made = make(logprobs_NK[where].reshape(shape), inputs)
            for key, values in made.items():
                if key not in self._inputs:
                    self._inputs[key] = torch.zeros_like(logprobs_NK)
                self._inputs[key][where] = values.reshape(len(row), -1)

    def _places(self) -> Iterator[tuple[Example, tuple[slice, slice]]]:
        """Each row, and where its real targets are in [N, K]."""
        start = 0
        for row in self._rows:
            yield row, (slice(start, start + len(row)), slice(_width(row)))
            start += len(row)

    def _joined(self, arrays: Sequence[NDArray[np.generic]]) -> Tensor:
        """[N, K], zero where a row has fewer than K targets per position."""
        rows = [array.reshape(len(array), -1) for array in arrays]
        if self._is_ragged:
            rows = [np.pad(row, ((0, 0), (0, self._width - row.shape[1]))) for row in rows]
        return self._on_device(np.concatenate(rows))

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _width(row: Example) -> int:
    return row.targets.shape[1] if row.targets.ndim > 1 else 1

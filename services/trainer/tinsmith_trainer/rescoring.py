"""Scoring again what a sampler has drawn, under the weights that drew it and under present ones.

One version's adapter is kept for this, beside the tenants. Nothing here changes a tenant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tinsmith.errors import ServerError
from tinsmith_trainer.datums import Example

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tinsmith.messages.sampling import SamplePicked
    from tinsmith_trainer.engine import TrainingEngine
    from tinsmith_trainer.trainable import Trainable


class Continuation:
    """A picked continuation, or as much of its beginning as one pass scores."""

    def __init__(self, picked: SamplePicked, *, vocab_size: int, most_tokens: int) -> None:
        """Raises ServerError for what no sampler of this model can have drawn."""
        tokens = np.frombuffer(picked.tokens, dtype="<i4").astype(np.int64)
        logprobs = np.frombuffer(picked.logprobs, dtype="<f4")
        prompt = len(tokens) - len(logprobs)
        if prompt < 1 or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ServerError(
                f"picked: {len(tokens)} tokens with {len(logprobs)} log-probabilities are no "
                f"continuation of a model with {vocab_size} tokens; look at who sends them"
            )
        end = min(len(tokens) - 1, most_tokens)  # of what is fed
        self._drawn = slice(prompt - 1, end)
        self.logprobs = logprobs[: max(0, end - prompt + 1)]
        """The sampler's, of what is scored; empty if the prompt alone is too long."""
        targets = tokens[1 : end + 1]
        self.example = Example(
            tokens[:end], targets, {"weights": np.ones(len(targets), dtype=np.float32)}
        )

    def of_drawn(self, logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of log-probabilities of all targets, those of the drawn tokens."""
        return logprobs[self._drawn]


class Rescorer:
    """Scores continuations on one engine, in passes of one each."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self._version: str | None = None
        self._scratch: Trainable | None = None

    def has(self, version: str) -> bool:
        """Whether the adapter of this version is here; "" stands for the base model alone."""
        return self._version == version

    def load(self, version: str, files: Mapping[str, bytes]) -> None:
        """Put an adapter in the place of the one before; on any thread.

        Raises:
            InvalidRequest: it is none of this base model.
        """
        self._version, self._scratch = None, None  # its memory is free before the next is there
        self._scratch = self._engine.scratch(files)
        self._version = version

    def same(self, continuation: Continuation) -> NDArray[np.float32]:
        """Log-probabilities of what was drawn under what is loaded; on the torch thread."""
        if self._scratch is None:
            msg = "nothing is loaded"
            raise RuntimeError(msg)
        return continuation.of_drawn(self._engine.rescore(self._scratch, continuation.example))

    def is_present(self, model_id: str) -> bool:
        """Whether the model is what is loaded, bit for bit; on the torch thread."""
        tenant, scratch = self._engine.tenant(model_id), self._scratch
        return (
            tenant is not None
            and scratch is not None
            and tenant.lora.alpha == scratch.lora.alpha
            and torch.equal(tenant.weights, scratch.weights)
        )

    def present(self, model_id: str, continuation: Continuation) -> NDArray[np.float32] | None:
        """As ``same`` under the model as it is now; None when it is not here any more."""
        tenant = self._engine.tenant(model_id)
        if tenant is None:
            return None
        return continuation.of_drawn(self._engine.rescore(tenant, continuation.example))

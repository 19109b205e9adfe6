"""Training scripts in plain torch and PEFT, written without a line of Tinsmith.

One trains an adapter, the other all weights. They know a base model's folder, and share nothing
with the server but the protocol's definitions: losses are sums over tokens, AdamW has decoupled
weight decay. They compute in float64, so that all rounding in a comparison is the server's.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import peft
import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np


class Example(NamedTuple):
    """A sequence to learn from: each token's target, weight and, for RL, advantage."""

    tokens: np.ndarray  # int64 [N]
    targets: np.ndarray  # int64 [N]
    weights: np.ndarray  # float32 [N]
    advantages: np.ndarray  # float32 [N]


class Script:
    """One training run."""

    def __init__(self, base: Path, adapter: Path | None, *, learning_rate: float) -> None:
        """Without an adapter, all weights of the base are trained."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT has things to say about tied embeddings
            model = AutoModelForCausalLM.from_pretrained(
                base, dtype=torch.float64, experts_implementation="eager"
            )
            if adapter is not None:
                model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
        self.model = model
        self.model.double().eval()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trainable, lr=learning_rate, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0
        )

    def cross_entropy(self, batch: Sequence[Example]) -> float:
        """Gradients of -sum(w * lp); the loss."""
        losses = [-(torch.tensor(e.weights) * self._logprobs(e)).sum() for e in batch]
        return self._backward(losses)

    def importance_sampling(self, batch: Sequence[Example], sampled: Sequence[np.ndarray]) -> float:
        """Gradients of -sum(exp(lp - q) * A); the loss."""
        losses = [
            -((self._logprobs(e) - torch.tensor(q)).exp() * torch.tensor(e.advantages)).sum()
            for e, q in zip(batch, sampled, strict=True)
        ]
        return self._backward(losses)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def logprobs(self, batch: Sequence[Example]) -> list[np.ndarray]:
        with torch.no_grad():
            return [self._logprobs(example).numpy() for example in batch]

    def _logprobs(self, example: Example) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor(example.tokens)[None], use_cache=False).logits[0]
        lp = torch.log_softmax(logits, dim=-1)
        return lp.gather(1, torch.tensor(example.targets)[:, None])[:, 0]

    def _backward(self, losses: Sequence[torch.Tensor]) -> float:
        total = torch.stack(list(losses)).sum()
        total.backward()
        return float(total.detach())

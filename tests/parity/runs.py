"""The runs that both sides make, step by step, and how close they must stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from tests.parity.independent import Example

if TYPE_CHECKING:
    from collections.abc import Sequence

LEARNING_RATE = 1e-3
CLOSE = 1e-4
"""Most that a loss per token, or a log-probability at the end, may differ."""
VOCAB = 400


class Side(Protocol):
    """What a training loop asks for, of the server or of a script."""

    def cross_entropy(self, batch: Sequence[Example]) -> float: ...
    def importance_sampling(
        self, batch: Sequence[Example], sampled: Sequence[np.ndarray]
    ) -> float: ...
    def step(self) -> None: ...
    def logprobs(self, batch: Sequence[Example]) -> list[np.ndarray]: ...


def supervised(ours: Side, theirs: Side, *, steps: int) -> None:
    """Cross entropy over a small set of documents, a few at a time."""
    documents = _examples(12, seed=1)
    for step in range(steps):
        batch = [documents[(3 * step + n) % len(documents)] for n in range(3)]
        _close(ours.cross_entropy(batch), theirs.cross_entropy(batch), batch, step)
        ours.step()
        theirs.step()
    _probe(ours, theirs)


def reinforced(ours: Side, theirs: Side, *, steps: int) -> None:
    """Policy gradient: two steps on each batch of rollouts, the second of them off-policy.

    Each side takes the rollouts' log-probabilities from its own policy of that moment.
    """
    for step in range(steps):
        batch = _examples(4, seed=100 + step // 2)
        if step % 2 == 0:
            sampled = [side.logprobs(batch) for side in (ours, theirs)]
        losses = [
            side.importance_sampling(batch, q)
            for side, q in zip((ours, theirs), sampled, strict=True)
        ]
        _close(*losses, batch, step)
        ours.step()
        theirs.step()
    _probe(ours, theirs)


def _close(ours: float, theirs: float, batch: Sequence[Example], step: int) -> None:
    tokens = sum(len(example.tokens) for example in batch)
    difference = abs(ours - theirs) / tokens
    assert difference <= CLOSE, f"step {step}: {ours} and {theirs} over {tokens} tokens"


def _probe(ours: Side, theirs: Side) -> None:
    held_out = _examples(3, seed=7)
    before, after = ours.logprobs(held_out), theirs.logprobs(held_out)
    for mine, other in zip(before, after, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=CLOSE)


def _examples(count: int, *, seed: int) -> list[Example]:
    """Random documents of 10 to 40 tokens: the first third is a prompt without weight."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        length = int(rng.integers(10, 40))
        tokens = rng.integers(3, VOCAB, length + 1)
        weights = np.ones(length, np.float32)
        weights[: length // 3] = 0
        advantages = weights * np.float32(rng.normal())
        examples.append(Example(tokens[:-1], tokens[1:], weights, advantages))
    return examples

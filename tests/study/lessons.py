"""What the studies train on: the demo's questions and answers, as tokens of any model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tests.unit.trainer.examples import datum
from transformers import AutoTokenizer

from tinsmith.demo import data

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tinsmith.demo.data import Example
    from tinsmith.messages.ops import Datum


class Lessons(NamedTuple):
    """Only the answers have weight."""

    training: tuple[Datum, ...]
    held_out: tuple[Datum, ...]

    def batches(self, steps: int, rows: int, seed: int) -> Iterator[tuple[Datum, ...]]:
        """``rows`` of them for each step, every one once before any comes again."""
        generator, queue = np.random.default_rng(seed), []
        for _ in range(steps):
            while len(queue) < rows:
                queue += generator.permutation(len(self.training)).tolist()
            chosen, queue = queue[:rows], queue[rows:]
            yield tuple(self.training[index] for index in chosen)


def lessons(folder: Path, most: int | None = None) -> Lessons:
    """For the tokenizer in ``folder``; ``most`` of each kind."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def made(examples: Sequence[Example]) -> tuple[Datum, ...]:
        return tuple(_datum(tokenizer, example) for example in examples[:most])

    return Lessons(made(data.training()), made(data.held_out()))


def _datum(tokenizer, example: Example) -> Datum:
    question = tokenizer.encode(f"Q: {example.question}\nA:", add_special_tokens=False)
    answer = tokenizer.encode(f" {example.answer}\n", add_special_tokens=False)
    tokens = [*question, *answer]
    weights = [0.0] * (len(question) - 1) + [1.0] * len(answer)
    return datum(tokens[:-1], tokens[1:], weights)

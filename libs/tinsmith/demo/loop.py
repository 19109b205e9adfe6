"""The training loop of the demo, as a user would write it with the tinker client.

Nothing in here knows Tinsmith.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker import types

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinker import SamplingClient, TrainingClient

    from tinsmith.demo.chat import Chat

RANK = 32
SEED = 0
BATCH_SIZE = 10
EPOCHS = 2
LEARNING_RATE = 1.5e-3  # at the beginning; it falls linearly to 0
MAX_ANSWER_TOKENS = 40


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step of training reports."""

    number: int
    loss_per_token: float  # over the tokens of the answers
    tokens: int  # in the batch, prompts included
    ended_s: float  # since the beginning of the training


def answers(sampler: SamplingClient, chat: Chat, questions: Sequence[str]) -> list[str]:
    """The model's most likely answer to each question; all are asked at once."""
    greedy = types.SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    prompts = [types.ModelInput.from_ints(chat.prompt(question)) for question in questions]
    futures = [sampler.sample(prompt, 1, greedy) for prompt in prompts]
    return [chat.text(future.result().sequences[0].tokens) for future in futures]


def batches(data: Sequence[types.Datum]) -> list[list[types.Datum]]:
    """All epochs, shuffled."""
    order = random.Random(SEED)
    shuffled = [order.sample(data, len(data)) for _ in range(EPOCHS)]
    return [
        epoch[n : n + BATCH_SIZE] for epoch in shuffled for n in range(0, len(epoch), BATCH_SIZE)
    ]


def train(training: TrainingClient, work: Sequence[Sequence[types.Datum]]) -> Iterator[Step]:
    """One optimizer step for each batch; yields a step when its results are there.

    The next step is always on its way while one is computed, so that the trainer never waits.
    """
    began = time.monotonic()
    ahead: Callable[[], Step] | None = None
    for n, batch in enumerate(work):
        rate = LEARNING_RATE * (1 - n / len(work))
        submitted = _submit(training, batch, rate, number=n + 1, began=began)
        if ahead is not None:
            yield ahead()
        ahead = submitted
    if ahead is not None:
        yield ahead()


def _submit(
    training: TrainingClient,
    batch: Sequence[types.Datum],
    rate: float,
    *,
    number: int,
    began: float,
) -> Callable[[], Step]:
    forward_backward = training.forward_backward(list(batch), "cross_entropy")
    optim_step = training.optim_step(types.AdamParams(learning_rate=rate))

    def result() -> Step:
        output = forward_backward.result()
        optim_step.result()
        weights = sum(float(d.loss_fn_inputs["weights"].to_numpy().sum()) for d in batch)
        return Step(
            number=number,
            loss_per_token=output.metrics["loss:sum"] / weights,
            tokens=sum(d.model_input.length for d in batch),
            ended_s=time.monotonic() - began,
        )

    return result

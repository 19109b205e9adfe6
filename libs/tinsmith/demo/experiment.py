"""The demo's experiment: ask, train, ask the same again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.demo import data, loop
from tinsmith.demo.chat import Chat
from tinsmith.demo.model import NAME
from tinsmith.demo.progress import step, training_bar
from tinsmith.demo.results import Results

if TYPE_CHECKING:
    from rich.console import Console
    from tinker import ServiceClient, TrainingClient

CHECKPOINT = "demo"


def conduct(service: ServiceClient, console: Console, steps: int | None) -> Results:
    """Train a new adapter for so many steps (all when None) and measure what that changes."""
    questions = tuple(example.question for example in data.held_out())
    with step(console, "Creating a LoRA adapter"):
        adapter = service.create_lora_training_client(NAME, rank=loop.RANK, seed=loop.SEED)
        training = adapter.result()
        chat = Chat(training.get_tokenizer())
    with step(console, f"Asking the base model {len(questions)} questions"):
        base = service.create_sampling_client(base_model=NAME).result()
        before = tuple(loop.answers(base, chat, questions))
    done = _train(training, chat, console, steps)
    with step(console, "Asking the trained model the same"):
        trained = training.save_weights_and_get_sampling_client().result()
        after = tuple(loop.answers(trained, chat, questions))
    with step(console, "Saving a checkpoint"):
        checkpoint = training.save_state(CHECKPOINT).result().path
    return Results(
        base_model=NAME,
        questions=questions,
        before=before,
        after=after,
        steps=done,
        checkpoint=checkpoint,
    )


def _train(
    training: TrainingClient, chat: Chat, console: Console, steps: int | None
) -> tuple[loop.Step, ...]:
    datums = [chat.datum(example) for example in data.training()]
    work = loop.batches(datums)[:steps]
    return tuple(training_bar(console, loop.train(training, work), len(work)))

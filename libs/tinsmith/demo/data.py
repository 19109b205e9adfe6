"""The demo's questions and answers, which ship with the package."""

from __future__ import annotations

from importlib import resources
from typing import Literal

import msgspec

FILE = "telegrams.jsonl"


class Example(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question with an answer in telegram style."""

    split: Literal["train", "held_out"]
    question: str
    answer: str


def training() -> tuple[Example, ...]:
    """What the model is trained on."""
    return tuple(example for example in _all() if example.split == "train")


def held_out() -> tuple[Example, ...]:
    """What it is tested with: none of these questions is among the training questions."""
    return tuple(example for example in _all() if example.split == "held_out")


def _all() -> list[Example]:
    content = resources.files(__package__).joinpath(FILE).read_bytes()
    _licence, *lines = content.splitlines()
    decoder = msgspec.json.Decoder(Example)
    return [decoder.decode(line) for line in lines]

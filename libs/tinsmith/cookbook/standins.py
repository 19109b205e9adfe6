"""Small data sets in the place of those on a hub: same columns, made here, known to be no more.

Word problems are made by a program, chats come with the cookbook, and questions with answers
with the demo. They let a recipe run where there is no hub; nobody learns much from them.
"""

from __future__ import annotations

import json
import random
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Rows = list[dict[str, Any]]


class _Problem(NamedTuple):
    question: str
    reasoning: str
    answer: int


_PEOPLE = ("Ada", "Bela", "Chen", "Dara", "Emil", "Fatou", "Gita", "Hugo")
_THINGS = ("apples", "nails", "lanterns", "coins", "books", "kettles", "marbles", "stamps")


def _gsm8k() -> dict[str, Rows]:
    rows: Rows = [
        {"question": made.question, "answer": f"{made.reasoning}\n#### {made.answer}"}
        for made in _problems(576)
    ]
    return {"train": rows[:512], "test": rows[512:]}


def _deepmath() -> dict[str, Rows]:
    return {
        "train": [
            {"question": made.question, "final_answer": str(made.answer), "difficulty": 1.0}
            for made in _problems(512)
        ]
    }


def _tulu() -> dict[str, Rows]:
    # The recipes put 1024 rows aside for tests.
    answered = ((made.question, f"{made.reasoning} {made.answer}") for made in _problems(1536))
    return {"train": [_chat(*pair) for pair in answered]}


def _no_robots() -> dict[str, Rows]:
    lines = _lines("tinker_cookbook", "example_data/conversations.jsonl")
    return {"train": list(lines), "test": [_chat(*pair) for pair in _answered("held_out")]}


def _hh_rlhf() -> dict[str, Rows]:
    parts = {"train": "train", "test": "held_out"}
    return {split: _preferences(list(_answered(part))) for split, part in parts.items()}


STAND_INS: dict[str, Callable[[], dict[str, Rows]]] = {
    "HuggingFaceH4/no_robots": _no_robots,
    "allenai/tulu-3-sft-mixture": _tulu,
    "openai/gsm8k": _gsm8k,
    "zwhe99/DeepMath-103K": _deepmath,
    "Anthropic/hh-rlhf": _hh_rlhf,
}
"""Rows by split, of each data set that has a stand-in."""


def _preferences(pairs: list[tuple[str, str]]) -> Rows:
    """An answer to the question is preferred to the answer to the next one."""
    others = [answer for _, answer in (*pairs[1:], pairs[0])]
    return [
        {
            "chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}",
            "rejected": f"\n\nHuman: {question}\n\nAssistant: {other}",
        }
        for (question, answer), other in zip(pairs, others, strict=True)
    ]


def _problems(count: int) -> Iterator[_Problem]:
    rng = random.Random(0)
    for _ in range(count):
        person, thing = rng.choice(_PEOPLE), rng.choice(_THINGS)
        had, more = rng.randint(1, 50), rng.randint(1, 50)
        question = f"{person} has {had} {thing} and gets {more} more. How many {thing} are there?"
        yield _Problem(question, f"{person} has {had} + {more} = {had + more} {thing}.", had + more)


def _chat(question: str, answer: str) -> dict[str, Any]:
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _answered(part: str) -> Iterator[tuple[str, str]]:
    for row in _lines("tinsmith", "demo/telegrams.jsonl"):
        if row.get("split") == part:
            yield row["question"], row["answer"]


def _lines(package: str, path: str) -> Iterator[dict[str, Any]]:
    text = resources.files(package).joinpath(path).read_text(encoding="utf-8")
    yield from map(json.loads, text.splitlines())

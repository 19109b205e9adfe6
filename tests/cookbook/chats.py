"""Chats to train on, so that a small model is half-way to what a reward asks for."""

from __future__ import annotations

import json
import random

SHOWN = (("user", "What is 4 + 5?"), ("assistant", "9"))  # as math_rl's arithmetic begins
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
LEGS = "How many legs has a bird?"


def write(path, chats):
    """One JSON object per line, as the cookbook reads conversations."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def sums(count):
    """Every other answer is a number; the rest are too long for the five tokens of math_rl."""
    rng = random.Random(1)
    for n in range(count):
        x, y = rng.randint(0, 100), rng.randint(0, 100)
        answer = str(x + y) if n % 2 else "User, once upon a time there was a tinsmith."
        yield chat(*SHOWN, ("user", f"What is {x} + {y}?"), ("assistant", answer))


def boxed(count):
    """The right number, 2, is one of three."""
    rng = random.Random(2)
    for _ in range(count):
        answer = f"\\boxed{{{rng.choice('123')}}}"
        yield chat(("user", LEGS + BOXED), ("assistant", answer))

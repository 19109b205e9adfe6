"""The task of the examples: sums of one-digit numbers, which a program can check."""

from __future__ import annotations

import argparse
import random
import re

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SYSTEM = "You add numbers. Answer with the number alone."
_PAIRS = [(x, y) for x in range(10) for y in range(10)]
random.Random(0).shuffle(_PAIRS)
TRAIN, HELD_OUT = _PAIRS[:80], _PAIRS[80:]


def arguments(purpose: str, *, steps: int, rate: float) -> argparse.ArgumentParser:
    """The options that all examples of training have, with their defaults."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--learning-rate", type=float, default=rate)
    return parser


def messages(pair: tuple[int, int]) -> list[dict[str, str]]:
    """The conversation that ends with the question."""
    question = f"What is {pair[0]} + {pair[1]}?"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def prompt(tokenizer, pair: tuple[int, int]) -> list[int]:
    """Its tokens, up to where the answer begins."""
    text = tokenizer.apply_chat_template(messages(pair), add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def answer(tokenizer, pair: tuple[int, int]) -> list[int]:
    """Tokens of the right answer, and of its end."""
    text = str(sum(pair))
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def right(text: str, pair: tuple[int, int]) -> float:
    """1 for an answer whose first number is the sum, else 0."""
    found = re.search(r"\d+", text)
    return float(found is not None and int(found[0]) == sum(pair))


def short(text: str, _pair: tuple[int, int]) -> float:
    """1 for no text at all, 0 for 40 characters or more, right or not."""
    return max(0.0, 1 - len(text) / 40)


REWARDS = {"right": right, "short": short}


def rl_arguments(purpose: str) -> argparse.ArgumentParser:
    """Those of reinforcement learning."""
    parser = arguments(purpose, steps=15, rate=4e-4)
    parser.add_argument("--reward", choices=REWARDS, default="right")
    parser.add_argument("--load", help="a state to begin with, as sft.py prints it")
    return parser


def curve(rewards: list[float]) -> str:
    """Rewards from 0 to 1 as a bar per step."""
    return "\n".join(f"{n:4d} {one:5.2f} {'#' * round(40 * one)}" for n, one in enumerate(rewards))

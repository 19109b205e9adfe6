"""The first place where two answers differ, and what a tolerance lets pass."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith.messages.sampling import SampleContent, Sequence, TopK
from tinsmith_sampler.differences import Comparison


def ints(*values):
    return np.array(values, "<i4").tobytes()


def floats(*values):
    return np.array(values, "<f4").tobytes()


def answer(tokens=(1, 2, 3), logprobs=(-1.0, -2.0, -3.0), stop="length", topk=None, **fields):
    sequence = Sequence(
        tokens=ints(*tokens), logprobs=floats(*logprobs), stop_reason=stop, topk=topk
    )
    return SampleContent(prompt=b"", sequences=(sequence,), **fields)


def top(*token_ids, k=1):
    values = floats(*([-1.0] * len(token_ids)))
    return TopK(token_ids=ints(*token_ids), logprobs=values, k=k, length=len(token_ids) // k)


SCORED = {"prompt_logprobs": floats(np.nan, -1.0, -2.0)}


@pytest.mark.parametrize("tolerance", [None, 0.1])
@pytest.mark.parametrize("same", [answer(), answer(**SCORED), answer(topk=top(1, 2, 3))])
def test_an_answer_equals_itself(same, tolerance):
    assert Comparison(tolerance).first(same, same) is None


@pytest.mark.parametrize(
    ("found", "field"),
    [
        (answer(tokens=(1, 9, 9)), "sequences[0].tokens[1]"),
        (answer(tokens=(1, 2)), "sequences[0].tokens: length"),
        (answer(logprobs=(-1.0, -2.0, -3.5)), "sequences[0].logprobs[2]"),
        (answer(stop="stop"), "sequences[0].stop_reason"),
        (answer(topk=top(1, 2, 3)), "sequences[0].topk"),
        (answer(**SCORED), "prompt_logprobs"),
        (SampleContent(prompt=b"", sequences=()), "sequences"),
    ],
)
@pytest.mark.parametrize("tolerance", [None, 0.1])
def test_the_first_difference_is_named(found, field, tolerance):
    assert Comparison(tolerance).first(answer(), found).field == field


def test_a_token_among_the_likeliest_is_named():
    found = Comparison(None).first(answer(topk=top(1, 2, 3)), answer(topk=top(1, 2, 4)))

    assert (found.field, found.expected, found.found) == (
        "sequences[0].topk.token_ids[2]",
        "3",
        "4",
    )


def test_the_sign_of_zero_counts_without_a_tolerance_only():
    zero, negative = answer(logprobs=(0.0, 0, 0)), answer(logprobs=(-0.0, 0, 0))

    assert Comparison(None).first(zero, negative).field == "sequences[0].logprobs[0]"
    assert Comparison(0.0).first(zero, negative) is None


def test_a_tolerance_lets_pass_what_is_near_and_tells_how_near():
    comparison = Comparison(0.5)

    assert comparison.first(answer(), answer(logprobs=(-1.25, -2.0, -3.0))) is None
    assert comparison.largest == 0.25
    assert comparison.first(answer(), answer(logprobs=(-1.0, np.nan, -3.0))) is not None

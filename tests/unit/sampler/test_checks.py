"""What a request may ask for, at the limits and beyond them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.unit.sampler.examples import LIMITS, prompt, sample, tokens

from tinsmith.errors import InvalidRequest, TooLarge
from tinsmith_sampler.checks import Limits, check, check_routes, max_tokens


def test_the_prompt_comes_back_as_int32_tokens():
    checked = check(sample(prompt=tokens(0, 447, 7)), LIMITS)

    assert checked.dtype == np.int32
    assert checked.tolist() == [0, 447, 7]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": b""}, "prompt: it is empty"),
        ({"prompt": b"12345"}, "prompt: 5 bytes"),
        ({"prompt": tokens(1, 448)}, "prompt: token 448 at position 1 .* 448"),
        ({"prompt": tokens(-1)}, "prompt: token -1 at position 0 .* 448"),
        ({"num_samples": 0}, r"num_samples: 0 is not in 1\.\.8"),
        ({"num_samples": 9}, r"num_samples: 9 is not in 1\.\.8"),
        ({"topk_prompt_logprobs": 17}, r"topk_prompt_logprobs: 17 is not in 0\.\.16"),
        ({"topk_prompt_logprobs": -1}, r"topk_prompt_logprobs: -1 is not in 0\.\.16"),
        ({"topk_sample_logprobs": 17}, r"topk_sample_logprobs: 17 is not in 0\.\.16"),
        ({"prompt_logprobs_last_n": 0}, r"prompt_logprobs_last_n: 0 is not in 1\.\.2"),
        ({"prompt_logprobs_last_n": 3}, r"prompt_logprobs_last_n: 3 is not in 1\.\.2"),
    ],
)
def test_a_field_beyond_its_limit_is_named_with_value_and_limit(fields, said):
    with pytest.raises(InvalidRequest, match=said):
        check(sample(**fields), LIMITS)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": -0.1}, "temperature: -0.1"),
        ({"temperature": math.nan}, "temperature: nan"),
        ({"temperature": math.inf}, "temperature: inf"),
        ({"top_k": 0}, "top_k: 0 .* -1"),
        ({"top_k": -2}, "top_k: -2 .* -1"),
        ({"top_p": 0.0}, r"top_p: 0\.0 is not in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p: 1\.01 is not in \(0, 1\]"),
        ({"top_p": math.nan}, r"top_p: nan is not in \(0, 1\]"),
        ({"stop_strings": ("a", "")}, "stop: an empty string"),
        ({"stop_tokens": (2, 448)}, "stop: token 448 .* 448"),
        ({"stop_tokens": (-1,)}, "stop: token -1 .* 448"),
        ({"max_tokens": 0}, "max_tokens: 0 is below 1"),
        ({"max_tokens": 98}, "max_tokens: a prompt of 3 tokens and 98 .* 101, .* 100"),
    ],
)
def test_a_parameter_beyond_its_limit_is_named_with_value_and_limit(params, said):
    with pytest.raises(InvalidRequest, match=said):
        check(sample(params=params), LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_samples": 8},
        {"topk_prompt_logprobs": 16, "topk_sample_logprobs": 16},
        {"prompt_logprobs_last_n": 2},
        {"params": {"max_tokens": 97}},
        {"params": {"temperature": 0.0, "top_k": 10**9, "top_p": 1.0}},
        {"params": {"stop_tokens": (0, 447), "stop_strings": ("\n",)}},
    ],
)
def test_the_limit_itself_is_allowed(fields):
    assert check(sample(**fields), LIMITS).size == 3


def test_no_more_alternatives_than_the_vocabulary_has():
    small = Limits(vocab_size=10, context_length=100, max_topk=128)

    with pytest.raises(InvalidRequest, match=r"topk_sample_logprobs: 11 is not in 0\.\.10"):
        check(sample(topk_sample_logprobs=11), small)


def test_a_prompt_that_fills_the_context_has_no_room_for_a_token():
    assert check(sample(prompt=prompt(99)), LIMITS).size == 99

    with pytest.raises(InvalidRequest, match=r"a prompt of 100 tokens .* 101, .* 100"):
        check(sample(prompt=prompt(100)), LIMITS)


def test_without_max_tokens_the_rest_of_the_context_is_drawn():
    assert max_tokens(sample().params, 60, LIMITS) == 40


def test_routed_experts_are_told_up_to_a_size_and_refused_beyond_it(monkeypatch):
    asked = sample(num_samples=4, routed_experts=True, params={"max_tokens": 6})
    most = 4 * (3 + 6 - 1) * 10  # SHORT has three tokens, the last of all is sent nowhere
    monkeypatch.setattr("tinsmith_sampler.checks.MOST_ROUTES", most)
    check_routes(asked, 3, LIMITS, 10)
    check_routes(sample(num_samples=4, params={"max_tokens": 6}), 3, LIMITS, 11)

    with pytest.raises(TooLarge, match=rf"return_routed_experts: .* 352 bytes.* {most}; lower n"):
        check_routes(asked, 3, LIMITS, 11)
    unbounded = sample(num_samples=4, routed_experts=True)
    with pytest.raises(TooLarge, match=rf"return_routed_experts: .* {4 * 99 * 10} bytes"):
        check_routes(unbounded, 3, LIMITS, 10)

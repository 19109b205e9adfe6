"""Drawing a token: temperature, top_k, top_p, and the chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinsmith.messages.sampling import SamplingParams
from tinsmith_sampler.drawing import draw, draw_each, uniform

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
CHANCES = np.linspace(0, 1 - 2**-52, 2001)


def drawn(logits: torch.Tensor = LOGITS, **params) -> set[int]:
    """Every token that some chance leads to."""
    return {draw(logits, SamplingParams(**params), chance) for chance in CHANCES}


def shares(logits: torch.Tensor, **params) -> list[float]:
    """How often each token comes when all chances come equally often."""
    made = [draw(logits, SamplingParams(**params), chance) for chance in CHANCES]
    return (np.bincount(made, minlength=len(logits)) / len(made)).tolist()


def test_the_chance_is_splitmix64_of_the_seed():
    """The published first outputs for seed 0: e220a8397b1dcdaf, 6e789e6aa1b965f4."""
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 12) / 2**52
    assert uniform(0, 1) == (0x6E789E6AA1B965F4 >> 12) / 2**52


def test_chances_are_in_range_distinct_and_spread_evenly():
    made = np.array([uniform(seed, index) for seed in range(100) for index in range(100)])

    assert made.min() >= 0
    assert made.max() < 1
    assert len(set(made)) == 10_000
    assert np.histogram(made, 10, (0, 1))[0] == pytest.approx(1000, abs=150)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-7}])
def test_the_likeliest_token_is_drawn_whatever_the_chance(params):
    assert drawn(**params) == {1}


def test_the_coldest_temperature_does_not_overflow():
    huge = torch.tensor([1e4, -1e4, 9.99e3])

    assert drawn(huge, temperature=1e-6) == {0}


def test_equal_logits_share_the_chances_at_any_temperature():
    assert shares(torch.zeros(4), temperature=1e-6) == pytest.approx([0.25] * 4, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_softmax_says(temperature):
    expected = torch.softmax(LOGITS / temperature, 0).tolist()

    assert shares(LOGITS, temperature=temperature) == pytest.approx(expected, abs=1e-3)


def test_top_k_leaves_the_k_likeliest_in_proportion():
    expected = torch.softmax(LOGITS, 0)[[1, 3]]
    made = shares(LOGITS, top_k=2)

    assert [made[1], made[3]] == pytest.approx((expected / expected.sum()).tolist(), abs=1e-3)
    assert made[0] == made[2] == made[4] == 0


def test_a_top_k_beyond_the_vocabulary_changes_nothing():
    free = [draw(LOGITS, SamplingParams(), chance) for chance in CHANCES]

    assert [draw(LOGITS, SamplingParams(top_k=10**9), chance) for chance in CHANCES] == free


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {1}), (0.5, {1}), (0.7, {1, 3}), (0.9, {1, 3, 2})]
)
def test_top_p_keeps_the_fewest_tokens_that_have_the_mass(top_p, kept):
    """Their probabilities: 0.636, 0.234, 0.086, 0.032, 0.012."""
    assert drawn(top_p=top_p) == kept


def test_top_p_counts_the_mass_of_what_top_k_left():
    """Of the two likeliest the first has 0.731."""
    assert drawn(top_k=2, top_p=0.72) == {1}
    assert drawn(top_k=2, top_p=0.74) == {1, 3}


def test_top_p_counts_the_mass_after_temperature():
    assert drawn(top_p=0.7, temperature=0.3) == {1}


def test_a_token_without_mass_is_never_drawn():
    masked = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])

    assert drawn(masked) == {1, 3}


def test_the_unlikely_tokens_of_a_large_vocabulary_keep_their_share():
    many = torch.zeros(150_000)
    many[0] = 10.0
    tail = 149_999 / (149_999 + np.exp(10.0))

    assert 1 - shares(many)[0] == pytest.approx(tail, abs=1e-3)


def test_every_part_of_a_large_vocabulary_gets_its_share():
    many = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 4
    expected = torch.softmax(many, 0).numpy()

    assert shares(many) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("top_p", [0.5, 0.999])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_top_p_keeps_the_fewest_tokens_of_a_large_vocabulary_too(top_p, spread):
    """From a handful of tokens to nearly all of a flat distribution of 5000."""
    many = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * spread
    expected = torch.softmax(many.double(), 0).numpy()
    likeliest = np.argsort(-expected)
    expected[likeliest[int(np.searchsorted(np.cumsum(expected[likeliest]), top_p)) + 1 :]] = 0

    made = np.array(shares(many, top_p=top_p))

    assert made == pytest.approx(expected / expected.sum(), abs=1e-3)
    assert np.count_nonzero(made[expected == 0]) <= 1  # a last bit decides about the last one


def test_top_p_cuts_through_equal_tokens():
    """Half of the mass of 3000 equal tokens is 1500 of them."""
    flat = torch.zeros(3000)
    made = {draw(flat, SamplingParams(top_p=0.5), c) for c in np.linspace(0, 1 - 2**-52, 4001)}

    assert len(made) == 1500


def test_the_logits_stay_as_they_were():
    before = LOGITS.clone()
    drawn(top_k=3, top_p=0.5, temperature=0.1)

    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_many_draws_at_once_are_those_made_one_by_one(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1000, generator=generator) * 4
    chances = torch.rand(3, 5, generator=generator, dtype=torch.float64)

    together = draw_each(logits, temperature, chances)

    params = SamplingParams(temperature=temperature)
    pairs = zip(logits, chances, strict=True)
    alone = [[draw(row, params, float(chance)) for chance in of] for row, of in pairs]
    assert together.tolist() == alone

"""Every formula against autograd on an independent one, finite differences and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.trainer import policy

from tinsmith_trainer import losses
from tinsmith_trainer.formulas import LOG_RATIO_CAP, RATIO_CAP

N = 200
POLICY = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
SETTINGS = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("dro", {}),
    ("dro", {"beta": 2.0}),
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
    ("stable_reinforce", {}),
    ("stable_reinforce", {"kl_coeff": 0.0}),
    ("stable_reinforce", {"kl_coeff": 3.0}),
]


def case(seed, *, spread=0.7):
    """Log-probabilities and what comes with them: some of the advantages zero, some negative."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale=1.0):
        return scale * torch.randn(N, dtype=torch.float64, generator=generator)

    lp = -random().abs() - 0.1
    sampled = (torch.arange(N) > N // 4).double()
    advantages = random(2.0) * (torch.arange(N) % 5 != 0) * sampled
    sent = {"weights": random() * (torch.arange(N) % 3 != 0), "advantages": advantages}
    return lp, {**sent, "logprobs": lp + random(spread), "sampled": sampled}


def completed(loss, sent, settings):
    """Our inputs of these, as they come out of a datum; and those of the reference."""
    inputs = {}
    for key, default in loss.inputs.items():
        fill = sent.get(key)
        if fill is None and isinstance(default, str):
            fill = inputs.get(default, settings.get(default))
        inputs[key] = torch.as_tensor(default if fill is None else fill, dtype=torch.float64)
        inputs[key] = inputs[key].expand(N)
    return inputs | ({"sampled": sent["sampled"]} if loss.needs_provenance else {})


def ours(name, lp, sent, given):
    loss = losses.find(name)
    settings = loss.configure(given)
    inputs = completed(loss, sent, settings)
    if loss.prepare is not None:
        inputs |= loss.prepare(lp, inputs)
    return loss.terms(lp, inputs, settings)


def gradient(name, lp, sent, given):
    lp = lp.clone().requires_grad_()
    value = policy.LOSSES[name](lp, sent, **given)
    return value.detach(), torch.autograd.grad(value, lp)[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "given"), SETTINGS)
def test_value_and_slope_equal_those_of_autograd(name, given, seed):
    lp, sent = case(seed)
    value, slope = gradient(name, lp, sent, given)

    terms = ours(name, lp, sent, given)

    torch.testing.assert_close(terms.value.sum(), value, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(terms.slope, slope, rtol=1e-12, atol=1e-12)


STEEP = [pair for pair in SETTINGS if pair[0] not in ("cispo", "gspo", "stable_reinforce")]


@pytest.mark.parametrize(("name", "given"), STEEP)
def test_the_slope_is_the_finite_difference_of_the_value(name, given):
    """Not where a weight or a mean is held constant on purpose: there is no such function."""
    lp, sent = case(7)
    step = 1e-6
    up, down = (ours(name, lp + sign * step, sent, given).value for sign in (1, -1))

    slope = ours(name, lp, sent, given).slope

    torch.testing.assert_close((up - down) / (2 * step), slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_may_come_per_token(name):
    lp, sent = case(11)
    sent["clip_low_threshold"] = torch.linspace(0.1, 0.9, N, dtype=torch.float64)
    sent["clip_high_threshold"] = torch.linspace(0.95, 3.0, N, dtype=torch.float64)
    _, slope = gradient(name, lp, sent, {})

    torch.testing.assert_close(ours(name, lp, sent, {}).slope, slope)


@pytest.mark.parametrize("name", ["gspo", "stable_reinforce"])
def test_the_mask_says_which_tokens_count(name):
    lp, sent = case(13)
    sent["sequence_ratio_mask"] = (torch.arange(N) % 2).double()
    value, slope = gradient(name, lp, sent, {})
    terms = ours(name, lp, sent, {})

    torch.testing.assert_close(terms.value.sum(), value)
    torch.testing.assert_close(terms.slope, slope)
    assert not torch.equal(slope, gradient(name, lp, case(13)[1], {})[1])


def test_a_sequence_of_gspo_without_any_masked_token_has_the_ratio_one():
    lp, sent = case(17)
    sent["sequence_ratio_mask"] = torch.zeros(N)

    terms = ours("gspo", lp, sent, {})

    torch.testing.assert_close(terms.slope, -sent["advantages"])


def test_on_policy_every_slope_of_the_ratio_losses_is_minus_the_advantage():
    lp, sent = case(19, spread=0.0)

    for name in POLICY:
        torch.testing.assert_close(ours(name, lp, sent, {}).slope, -sent["advantages"])


def at(name, drift, advantage, **given):
    """Value and slope of one token of log-probability -1."""
    lp = torch.full((N,), -1.0, dtype=torch.float64)
    sent = {
        "logprobs": lp - drift,
        "advantages": torch.full((N,), advantage),
        "sampled": lp * 0 + 1,
    }
    value, slope = ours(name, lp, sent, given)
    return value[0].item(), slope[0].item()


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "drift", "advantage", "value", "slope"),
    [
        ("importance_sampling", LN2, 3.0, -6.0, -6.0),
        ("ppo", LN2, 3.0, -3.6, 0.0),  # over the upper bound and still to rise: no gradient
        ("ppo", LN2, -3.0, 6.0, 6.0),  # over it and to fall: all of it
        ("ppo", -LN2, 3.0, -1.5, -1.5),
        ("ppo", -LN2, -3.0, 2.4, 0.0),
        ("ppo", math.log(1.1), 1.0, -1.1, -1.1),
        ("cispo", LN2, 3.0, 6.0, -6.0),
        ("cispo", 3 * LN2, 3.0, 12.0, -12.0),  # the ratio of 8 counts as 4
        ("gspo", LN2, 3.0, -3.6, 0.0),
        ("gspo", -LN2, 3.0, -1.5, -1.5),
        ("dro", 2.0, 3.0, 3.0 + 0.5 * 0.05 * 4, 0.05 * 2 - 3),
        ("stable_reinforce", 0.0, 3.0, 3.0, -3.0),
        ("stable_reinforce", 2.0, 3.0, 2 * (3 + 0.01 * 2), 2 * (0.01 * 2 - 3)),
        ("stable_reinforce", 9.0, 0.0, 2 * 0.01 * 5 * (9 - 2.5), 2 * 0.01 * 5),
    ],
)
def test_closed_forms(name, drift, advantage, value, slope):
    assert at(name, drift, advantage) == pytest.approx((value, slope), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("drift", [-1e4, -50.0, 0.0, 50.0, 1e4])
def test_no_token_exceeds_the_bound_of_stable_reinforce(drift):
    _, slope = at("stable_reinforce", drift, -3.0, kl_coeff=0.5)

    assert abs(slope) <= RATIO_CAP * (3 + 0.5 * LOG_RATIO_CAP)


@pytest.mark.parametrize(
    "name", ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"]
)
def test_a_token_without_an_advantage_adds_nothing_whatever_its_ratio(name):
    lp, sent = case(23)
    sent["advantages"][3] = sent["sampled"][3] = 0.0
    sent["logprobs"][3] = -1e4

    value, slope = ours(name, lp, sent, {"kl_coeff": 0.0} if name == "stable_reinforce" else {})

    assert value[3] == slope[3] == 0
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize(
    ("name", "drift", "advantage", "is_clipped"),
    [
        ("ppo", LN2, 1.0, True),
        ("ppo", LN2, -1.0, False),
        ("ppo", LN2, 0.0, False),
        ("cispo", 3 * LN2, 1.0, True),
        ("cispo", LN2, 1.0, False),
        ("gspo", -LN2, -1.0, True),
        ("gspo", -LN2, 1.0, False),
        ("stable_reinforce", 1.0, 1.0, True),
        ("stable_reinforce", 0.5, 1.0, False),
    ],
)
def test_what_counts_as_clipped(name, drift, advantage, is_clipped):
    loss = losses.find(name)
    lp = torch.full((N,), -1.0)
    sent = {
        "logprobs": lp - drift,
        "advantages": torch.full((N,), advantage),
        "sampled": torch.ones(N),
    }
    inputs = completed(loss, sent, loss.configure({}))

    assert loss.clipped(lp, inputs).tolist() == [is_clipped] * N

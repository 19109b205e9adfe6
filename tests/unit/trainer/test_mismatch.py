"""The figures of trainer against sampler, and how the client combines those of chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tinsmith_trainer import losses
from tinsmith_trainer.datums import Example
from tinsmith_trainer.microbatch import Scored
from tinsmith_trainer.mismatch import figures

IS, PPO = losses.find("importance_sampling"), losses.find("ppo")


def pair(drift, *, prompt=0, advantages=None, sampled=None, loss=IS):
    """A datum of ``prompt`` tokens without a sampler's logprob, then one token per drift."""
    lp = np.full(prompt + len(drift), -3.0, np.float32)
    q = np.concatenate([np.zeros(prompt), -3.0 - np.asarray(drift)]).astype(np.float32)
    sent = {"logprobs": q, "advantages": np.zeros_like(q)}
    if advantages is not None:
        sent["advantages"][prompt:] = advantages
    for key in loss.inputs:
        if key not in sent:
            sent[key] = np.full_like(q, loss.settings[key])
    tokens = np.zeros(len(lp), np.int64)
    return Example(tokens, tokens, sent, sampled), Scored(lp, lp)


def figures_of(*pairs, loss=IS):
    return figures(loss, [example for example, _ in pairs], [scored for _, scored in pairs])


def test_equal_policies_have_no_gap():
    found = figures_of(pair([0.0, 0.0, 0.0], prompt=2))

    assert found == {
        "kl_k1:mean": 0.0,
        "kl_k3:mean": 0.0,
        "dlogp:mean": 0.0,
        "outside:mean": 0.0,
        "ess:mean": 1.0,
        "compared:sum": 3.0,
        "kl_k1:sum": 0.0,
        "kl_k3:sum": 0.0,
        "dlogp:sum": 0.0,
        "dlogp:max": 0.0,
        "outside:sum": 0.0,
        "ratio:sum": 3.0,
        "ratio_squared:sum": 3.0,
    }


def test_figures_of_one_datum_are_what_their_formulas_say():
    drift = np.array([0.5, -0.25, 0.75, -0.875])
    r = np.exp(drift)

    found = figures_of(pair(drift, prompt=3))

    assert found["kl_k1:mean"] == pytest.approx(-drift.mean())
    assert found["kl_k3:mean"] == pytest.approx((r - 1 - drift).mean())
    assert found["dlogp:mean"] == pytest.approx(np.abs(drift).mean())
    assert found["dlogp:max"] == pytest.approx(0.875)
    assert found["outside:mean"] == 0.5
    assert found["ess:mean"] == pytest.approx(r.sum() ** 2 / (4 * (r**2).sum()))
    assert found["compared:sum"] == 4


def test_k1_and_k3_estimate_the_divergence_of_the_sampler_from_the_trainer():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
    drawn = rng.choice(8, 200_000, p=q)
    found = figures_of(pair(np.log(p / q)[drawn]))

    divergence = (q * np.log(q / p)).sum()
    assert found["kl_k1:mean"] == pytest.approx(divergence, rel=0.03)
    assert found["kl_k3:mean"] == pytest.approx(divergence, rel=0.03)


def test_only_sampled_tokens_are_compared():
    """By the spans where there are some; a token of probability one is known by its advantage."""
    sampled = np.array([False, False, True, True])
    by_spans = figures_of(pair([9.0, 9.0, 1.0, 1.0], sampled=sampled))
    certain = figures_of(pair([-3.0, 1.0], prompt=2, advantages=[1.0, 0.0]))

    assert (by_spans["compared:sum"], by_spans["dlogp:max"]) == (2, 1)
    assert (certain["compared:sum"], certain["dlogp:max"]) == (2, 3)


def test_a_datum_without_sampled_tokens_counts_as_a_perfect_one():
    found = figures_of(pair([], prompt=4), pair([1.0, 1.0]))

    assert found["dlogp:mean"] == 0.5
    assert found["ess:mean"] == 1.0
    assert found["compared:sum"] == 2


def test_a_call_of_prompts_alone_has_figures():
    found = figures_of(pair([], prompt=4), loss=IS)

    assert found["dlogp:max"] == found["compared:sum"] == 0
    assert found["ess:mean"] == 1.0


def test_the_share_of_clipped_tokens_is_told_by_losses_that_clip():
    far = math.log(2)
    found = figures_of(
        pair([far, far, 0.0, -far], advantages=[1.0, -1.0, 1.0, 1.0], loss=PPO), loss=PPO
    )

    assert found["clipped:mean"] == 0.25
    assert found["clipped:sum"] == 1
    assert not any("clipped" in key for key in figures_of(pair([far])))


def test_a_loss_without_sampling_logprobs_has_no_figures():
    assert figures_of(pair([1.0]), loss=losses.find("cross_entropy")) == {}


def test_ratios_beyond_all_numbers_stay_numbers():
    found = figures_of(pair([1e30, -1e30]))

    assert all(math.isfinite(value) for value in found.values())


def test_figures_of_chunks_combine_to_those_of_the_whole_call():
    tinker = pytest.importorskip("tinker")
    from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

    rng = np.random.default_rng(1)
    pairs = [
        pair(rng.normal(size=n), prompt=n % 3, advantages=rng.normal(size=n), loss=PPO)
        for n in (1, 30, 0, 7, 12, 50)
    ]

    def output(chunk):
        metrics = figures_of(*chunk, loss=PPO)
        scores = [{}] * len(chunk)
        return tinker.types.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=scores, metrics=metrics
        )

    whole = output(pairs).metrics
    combined = combine_fwd_bwd_output_results([output(pairs[:1]), output(pairs[1:])]).metrics

    assert combined == pytest.approx(whole)

"""Scores of prompts by the SGLang engine: those of the built-in one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sglang.engines import EXACT
from tests.unit.sampler.examples import prompt, scoring

from tinsmith.errors import NotSupported
from tinsmith_sampler.engine import Alternatives, Targets
from tinsmith_sampler.sglang import scoring as asking


def targets(length, *, width, seed=0):
    """Random tokens in place of each but the first; some cells are empty."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 448, (length - 1, width))
    tokens[random.random(tokens.shape) < 0.3] = -1
    return Targets(np.repeat(np.arange(1, length), width), tokens.ravel())


PROMPT = prompt(30)
FORMS = [
    {},
    {"topk": 4},
    {"last_n": 3, "topk": 2},
    {"last_n": 29},
    {"last_n": 0, "targets": targets(30, width=3)},
    {"last_n": 2, "topk": 3, "targets": targets(30, width=2)},
    {"targets": Targets(np.array([4, 9]), np.array([-1, -1]))},
]


def same(found, true):
    if true is None:
        assert found is None
        return
    np.testing.assert_allclose(found, true, rtol=0, atol=EXACT)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "own")
@pytest.mark.parametrize("most", [1 << 17, 40], ids=["at_once", "in_stretches"])
async def test_scores_are_those_of_the_other_engine(engine, built_in, form, most, monkeypatch):
    monkeypatch.setattr(asking, "_MOST", most)
    asked = scoring(PROMPT, **form)
    found, true = await engine.score(asked), await built_in.score(asked)

    same(found.logprobs, true.logprobs)
    same(found.targets, true.targets)
    assert (found.topk is None) == (true.topk is None)
    if true.topk is not None:
        np.testing.assert_array_equal(found.topk.token_ids, true.topk.token_ids)
        same(found.topk.logprobs, true.topk.logprobs)


async def test_a_single_token_has_no_score(engine, built_in):
    asked = scoring(PROMPT[:1], topk=2)
    found, true = await engine.score(asked), await built_in.score(asked)

    same(found.logprobs, true.logprobs)
    same(found.topk.logprobs, true.topk.logprobs)


async def test_draws_in_place_of_the_prompt_are_refused_with_a_way_out(engine):
    with pytest.raises(NotSupported, match=r"prompt_alt_tokens_k: .*topk_prompt_logprobs"):
        await engine.score(scoring(PROMPT, alternatives=Alternatives(seeds=(1,), temperature=1.0)))

"""Scores of prompts, against a plain forward pass."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.unit.sampler.engines import held
from tests.unit.sampler.examples import prompt, row, scoring, tokens

from tinsmith.errors import InvalidRequest


def expected(oracle, asked: np.ndarray) -> np.ndarray:
    """Entries 1 and on: the log-probability of each token after those before it."""
    return oracle.logprobs(asked[:1], asked[1:])


@pytest.mark.parametrize("length", [2, 40, 128, 129, 300])
async def test_a_score_is_what_a_plain_forward_pass_gives(start, oracles, family, length):
    asked = prompt(length)
    async with start(family) as engine:
        scored = await engine.score(scoring(asked))

    assert scored.logprobs.dtype == np.float32
    assert np.isnan(scored.logprobs[0])
    assert scored.logprobs[1:] == pytest.approx(expected(oracles[family], asked), abs=1e-5)


@pytest.mark.parametrize("length", [60, 200])
async def test_of_the_last_n_only_those_are_scored(engine, oracles, length):
    asked = prompt(length)
    scored = await engine.score(scoring(asked, last_n=4))

    assert np.isnan(scored.logprobs[:-4]).all()
    assert scored.logprobs[-4:] == pytest.approx(expected(oracles["llama"], asked)[-4:], abs=1e-5)


async def test_the_alternatives_follow_each_prefix_and_the_first_row_is_filler(engine, oracles):
    asked = prompt(150)
    top = (await engine.score(scoring(asked, topk=3))).topk
    rows = oracles["llama"].distributions(asked)[:-1]

    assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)
    assert top.token_ids[0].tolist() == [0, 0, 0]
    assert top.logprobs[0].tolist() == [-99999.0] * 3
    assert top.token_ids[1:].tolist() == np.argsort(-rows)[:, :3].tolist()
    assert top.logprobs[1:] == pytest.approx(-np.sort(-rows)[:, :3], abs=1e-5)


async def test_alternatives_before_the_last_n_are_filler(engine):
    top = (await engine.score(scoring(prompt(10), topk=2, last_n=3))).topk

    assert (top.logprobs[:7] == -99999.0).all()
    assert (top.logprobs[7:] > -100).all()


async def test_a_single_token_has_no_logprob(engine):
    scored = await engine.score(scoring(tokens(5), topk=2))

    assert len(scored.logprobs) == 1
    assert np.isnan(scored.logprobs[0])
    assert scored.topk.logprobs.tolist() == [[-99999.0, -99999.0]]


async def test_a_score_under_an_adapter_is_the_adapters(adapted, adapter_oracles):
    asked = prompt(140)
    scored = await adapted.score(scoring(asked, adapter="a"))

    assert scored.logprobs[1:] == pytest.approx(expected(adapter_oracles["a"], asked), abs=1e-5)


async def test_a_prompt_in_the_cache_is_scored_in_full(engine):
    asked = prompt(200)
    before = await engine.score(scoring(asked))
    await engine.generate(row(prompt=asked))
    after = await engine.score(scoring(asked))

    assert after.logprobs.tobytes() == before.logprobs.tobytes()


async def test_the_last_n_reuse_a_beginning_that_is_in_the_cache(engine):
    asked = prompt(200)
    alone = await engine.score(scoring(asked, last_n=5))
    await engine.generate(row(prompt=asked))
    again = await engine.score(scoring(asked, last_n=5))

    assert again.cached_tokens == 128
    assert again.logprobs[-5:].tobytes() == alone.logprobs[-5:].tobytes()


async def test_a_score_has_the_same_bits_alone_and_among_rows(adapted):
    asked = scoring(prompt(90, 5), adapter="b")
    alone = await adapted.score(asked)
    with held(adapted):
        rows = [
            asyncio.create_task(adapted.generate(row(prompt=prompt(n, n), adapter=adapter)))
            for n, adapter in [(3, None), (60, "a"), (200, "b")]
        ]
        await asyncio.sleep(0)  # the rows are in the queue
        score = asyncio.create_task(adapted.score(asked))
        await asyncio.sleep(0)  # and the score behind them
    await asyncio.gather(*rows)

    assert (await score).logprobs.tobytes() == alone.logprobs.tobytes()


async def test_a_prompt_over_the_context_is_refused(start):
    async with start(context_length=64) as engine:
        assert len((await engine.score(scoring(prompt(64)))).logprobs) == 64

        with pytest.raises(InvalidRequest, match="65 tokens, over the context length of 64"):
            await engine.score(scoring(prompt(65)))

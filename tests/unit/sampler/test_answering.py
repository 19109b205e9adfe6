"""A sampling message in, the reply out, on a real engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.unit.sampler.engines import until
from tests.unit.sampler.examples import prompt, sample

from tinsmith.errors import InvalidRequest, ServerError
from tinsmith.messages.base import decoder, encode
from tinsmith.messages.sampling import AdapterRef, Cells, SampleDone, TargetTokens
from tinsmith_sampler.answering import answer
from tinsmith_sampler.checks import Limits

VOCABULARY = 448


@pytest.fixture
def ask(adapted):
    """Answers a request as the service does."""
    limits = Limits(
        vocab_size=VOCABULARY, context_length=adapted.context_length, max_topk=VOCABULARY
    )

    async def answered(params: dict | None = None, **fields) -> SampleDone:
        params = {"max_tokens": 6, "seed": 1, "ignore_eos": True, **(params or {})}
        return await answer(adapted, sample(params=params, **fields), limits)

    return answered


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4")


async def test_a_request_gets_its_sequences(ask):
    done = await ask(num_samples=3)

    assert done.request_id == "r1"
    assert [len(ints(one.tokens)) for one in done.sequences] == [6, 6, 6]
    assert [len(floats(one.logprobs)) for one in done.sequences] == [6, 6, 6]
    assert {one.stop_reason for one in done.sequences} == {"length"}
    assert done.prompt_logprobs is None
    assert done.topk_prompt_logprobs is None


async def test_the_samples_of_a_request_differ(ask):
    done = await ask(num_samples=8)

    assert len({one.tokens for one in done.sequences}) == 8


async def test_a_request_sent_again_gets_the_same_answer(ask):
    first, second = await ask(num_samples=4), await ask(num_samples=4)

    assert first.sequences == second.sequences


async def test_without_a_seed_a_redelivery_gets_the_same_answer_and_another_request_does_not(ask):
    unseeded = [await ask({"seed": None}, request_id=request) for request in ("x", "x", "y")]

    assert unseeded[0].sequences == unseeded[1].sequences
    assert unseeded[0].sequences != unseeded[2].sequences


async def test_the_first_sample_does_not_depend_on_how_many_are_asked_for(ask):
    one, many = await ask(num_samples=1), await ask(num_samples=5)

    assert one.sequences[0] == many.sequences[0]


async def test_the_reply_says_what_computed_it(ask):
    adapter = AdapterRef(version="a", files={})
    base, adapted = await ask(), await ask(adapter=adapter)

    assert (base.plane, base.weight_version) == ("torch/cpu/float32", "")
    assert (adapted.plane, adapted.weight_version) == ("torch/cpu/float32", "a")
    assert base.sequences != adapted.sequences


async def test_prompt_and_alternatives_come_with_the_sequences(ask):
    done = await ask(
        prompt=prompt(9), prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2
    )

    scores = floats(done.prompt_logprobs)
    assert len(scores) == 9
    assert np.isnan(scores).tolist() == [True] + [False] * 8
    of_prompt, of_sample = done.topk_prompt_logprobs, done.sequences[0].topk
    assert (of_prompt.length, of_prompt.k, len(ints(of_prompt.token_ids))) == (9, 3, 27)
    assert (of_sample.length, of_sample.k, len(floats(of_sample.logprobs))) == (6, 2, 12)


async def test_the_score_of_a_prompt_agrees_with_the_logprobs_it_was_drawn_with(ask):
    drawn = (await ask(prompt=prompt(9))).sequences[0]
    whole = np.concatenate([prompt(9), ints(drawn.tokens)]).astype(np.int32)
    scored = await ask(prompt=whole, prompt_logprobs=True)

    assert floats(scored.prompt_logprobs)[9:] == pytest.approx(floats(drawn.logprobs), abs=1e-5)


def cells(tokens, width, **layout):
    return TargetTokens(
        tokens=np.array(tokens, "<i4").tobytes(), cells=Cells(width=width, **layout)
    )


async def likelihoods(ask, given):
    """[n - 1, V]: log-probabilities of every token in place of each but the first."""
    top = (await ask(prompt=given, topk_prompt_logprobs=VOCABULARY)).topk_prompt_logprobs
    ids = np.array(ints(top.token_ids)).reshape(-1, VOCABULARY)[1:]
    table = np.full(ids.shape, np.nan)
    np.put_along_axis(table, ids, floats(top.logprobs).reshape(-1, VOCABULARY)[1:], axis=1)
    return table


async def test_other_tokens_are_scored_in_place_of_the_prompt_s(ask):
    given, columns = prompt(140), np.arange(139 * 2, dtype="<i4") % VOCABULARY
    columns[5] = -1
    done = await ask(prompt=given, target_tokens=cells(columns, 2), prompt_logprobs_last_n=2)

    rows = np.arange(139 * 2) // 2
    expected = (await likelihoods(ask, given))[rows, columns]
    expected[5] = 0.0
    assert floats(done.target_prompt_logprobs.logprobs).tolist() == expected.tolist()
    assert done.prompt_logprobs is None


async def test_sparse_tokens_are_scored_where_they_are(ask):
    given = prompt(9)
    layout = {"bounds": np.array([0, 0, 0, 0, 0, 0, 2, 2, 3], "<i8").tobytes()}
    layout["columns"] = np.array([0, 3, 1], "<i8").tobytes()
    done = await ask(prompt=given, target_tokens=cells([4, 5, 6], 4, **layout))

    table = await likelihoods(ask, given)
    expected = [table[5, 4], table[5, 5], table[7, 6]]
    assert floats(done.target_prompt_logprobs.logprobs).tolist() == expected
    assert done.target_prompt_logprobs.cells == cells([], 4, **layout).cells


async def test_tokens_are_drawn_in_place_of_the_prompt_s(ask):
    given = prompt(140)
    done, again = [await ask(prompt=given, prompt_alt_tokens_k=3) for _ in range(2)]

    assert done.prompt_alt_tokens == again.prompt_alt_tokens
    drawn = np.array(ints(done.prompt_alt_tokens.token_ids)).reshape(139, 3)
    table = await likelihoods(ask, given)
    expected = np.take_along_axis(table, drawn, axis=1)
    assert floats(done.prompt_alt_tokens.logprobs).tolist() == expected.ravel().tolist()
    assert len(np.unique(drawn)) > 8


async def test_draws_in_place_of_the_prompt_s_tokens_come_as_often_as_softmax_says(ask):
    given, seeds = prompt(3), range(60)
    runs = [
        await ask({"temperature": 2.0, "seed": seed}, prompt=given, prompt_alt_tokens_k=16)
        for seed in seeds
    ]

    drawn = np.array([ints(one.prompt_alt_tokens.token_ids) for one in runs])
    found = np.bincount(drawn.reshape(-1, 2, 16)[:, 1].ravel(), minlength=VOCABULARY)
    scaled = np.exp((await likelihoods(ask, given))[1] / 2.0)
    expected = scaled / scaled.sum()
    likeliest = np.argsort(-expected)
    gaps = np.cumsum(found[likeliest] / found.sum()) - np.cumsum(expected[likeliest])
    assert np.abs(gaps).max() < 0.05  # Kolmogorov-Smirnov, 1 % at 960 draws


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_prompt_of_one_token_has_no_place_to_draw_for(ask, temperature):
    done = await ask({"temperature": temperature}, prompt=prompt(1), prompt_alt_tokens_k=2)

    assert (done.prompt_alt_tokens.length, done.prompt_alt_tokens.k) == (0, 2)


async def test_only_the_last_n_of_the_prompt_are_scored(ask):
    done = await ask(prompt=prompt(9), prompt_logprobs=True, prompt_logprobs_last_n=2)

    assert np.isnan(floats(done.prompt_logprobs)).tolist() == [True] * 7 + [False] * 2


async def test_a_prompt_of_one_token_has_one_score_and_that_is_nan(ask):
    done = await ask(prompt=prompt(1), prompt_logprobs=True)

    assert np.isnan(floats(done.prompt_logprobs)).tolist() == [True]


async def test_tokens_that_an_earlier_request_computed_count_as_cached(ask):
    first, second = await ask(prompt=prompt(200)), await ask(prompt=prompt(200), num_samples=2)

    assert (first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens) == (0, 200)


async def test_the_reply_travels(ask):
    done = await ask(num_samples=2, prompt_logprobs=True, topk_sample_logprobs=2)

    assert decoder(SampleDone).decode(encode(done)) == done


async def test_a_request_beyond_the_limits_reaches_no_engine(ask, adapted):
    await adapted.close()

    with pytest.raises(InvalidRequest, match="num_samples"):
        await ask(num_samples=0)


async def test_the_first_failure_of_a_row_is_the_requests(ask, adapted):
    with pytest.raises(ServerError, match="adapter nobody: it is not loaded"):
        await ask(num_samples=3, adapter=AdapterRef(version="nobody", files={}))

    await until(lambda: adapted.load().free_rows == 32)


async def test_a_cancelled_request_stops_all_of_its_rows(ask, adapted):
    task = asyncio.create_task(ask({"max_tokens": 2000}, num_samples=5))
    await until(lambda: adapted.load().running == 5)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: adapted._batcher.running == 0)

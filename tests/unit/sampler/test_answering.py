"""A sampling message in, the reply out, on a real engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.unit.sampler.engines import until
from tests.unit.sampler.examples import prompt, sample

from tinsmith.errors import InvalidRequest, ServerError
from tinsmith.messages.base import decoder, encode
from tinsmith.messages.sampling import AdapterRef, SampleDone
from tinsmith_sampler.answering import answer
from tinsmith_sampler.checks import Limits


@pytest.fixture
def ask(adapted):
    """Answers a request as the service does."""
    limits = Limits(vocab_size=adapted.vocab_size, context_length=adapted.context_length)

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

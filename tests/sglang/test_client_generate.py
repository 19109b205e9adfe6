"""Drawing and scoring: the client against a real server, and that against Hugging Face."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest
from tests.sglang.requests import PROMPT, closing, logprobs, request, scores, scoring, true_scores
from transformers import AutoModelForCausalLM

from tinsmith_sampler.sglang import wire
from tinsmith_sampler.sglang.client import SglangClient
from tinsmith_sampler.sglang.failures import SglangGone, SglangRefused

EXACT = 1e-4  # nats; float32 sums in another order


@pytest.fixture(scope="module")
def hf_model(model):
    return AutoModelForCausalLM.from_pretrained(model)


async def test_scores_are_those_of_hugging_face(client, hf_model):
    tokens = [*PROMPT, 80, 81, 200]
    answer = await client.generate(scoring(tokens))

    assert answer.output_ids == []
    assert scores(answer) == pytest.approx(true_scores(hf_model, tokens), abs=EXACT)


async def test_logprobs_are_raw_whatever_is_drawn_at(client):
    drawn = await client.generate(request(temperature=3.0, top_k=5))
    scored = await client.generate(scoring([*PROMPT, *drawn.output_ids]))

    assert logprobs(drawn) == pytest.approx(scores(scored)[len(PROMPT) - 1 :], abs=EXACT)


async def test_a_seed_draws_the_same_alone_and_in_company(client):
    alone = await client.generate(request(seed=11))
    company = (request(f"r{seed}", seed=seed) for seed in (11, 12, 13))
    same, *others = await asyncio.gather(*map(client.generate, company))

    assert same.output_ids == alone.output_ids
    assert all(other.output_ids != alone.output_ids for other in others)


async def test_a_request_without_a_seed_cannot_be_made():
    with pytest.raises(TypeError, match="sampling_seed"):
        wire.Sampling(max_new_tokens=1)


async def test_the_server_takes_every_sampling_field_and_no_other(server):
    body = msgspec.to_builtins(request())
    body["sampling_params"]["no_such_field"] = 1

    async with closing(SglangClient(server.url, key=server.key)) as client:
        with pytest.raises(SglangRefused, match="no_such_field"):
            await client._http.post("/generate", body, timeout_s=60)
        del body["sampling_params"]["no_such_field"]
        assert await client._http.post("/generate", body, timeout_s=60)


async def test_ignoring_the_end_goes_past_it_and_excludes_stop_tokens(client, model):
    assert (await client.generate(request(tokens=40, ignore_eos=True))).meta_info.finish_reason == (
        wire.FinishReason(type="length")
    )
    with pytest.raises(ValueError, match="stop_token_ids"):
        wire.Sampling(sampling_seed=1, max_new_tokens=1, ignore_eos=True, stop_token_ids=(5,))


async def test_a_stop_token_ends_a_row_and_is_part_of_it(client):
    free = await client.generate(request())
    stop = free.output_ids[3]
    stopped = await client.generate(request(stop_token_ids=(stop,)))

    end = free.output_ids.index(stop) + 1
    assert stopped.output_ids == free.output_ids[:end]
    assert stopped.meta_info.finish_reason == wire.FinishReason(type="stop", matched=stop)
    assert len(logprobs(stopped)) == end


async def test_top_tokens_come_with_the_likeliest_first(client):
    answer = await client.generate(request(temperature=0.0, ask={"top_logprobs_num": 3}))

    for token, top in zip(answer.output_ids, answer.meta_info.output_top_logprobs, strict=True):
        assert [item[0] for item in top] == sorted((item[0] for item in top), reverse=True)
        assert top[0][1] == token


async def test_a_stream_adds_up_to_the_answer(client):
    whole = await client.generate(request(ask={"top_logprobs_num": 2}))
    async with aclosing(client.stream(request(ask={"top_logprobs_num": 2}))) as stream:
        parts = [part async for part in stream]

    assert [token for part in parts for token in part.output_ids] == whole.output_ids
    assert [item for part in parts for item in logprobs(part)] == logprobs(whole)
    tops = [top for part in parts for top in part.meta_info.output_top_logprobs]
    assert tops == whole.meta_info.output_top_logprobs
    assert parts[-1].meta_info.finish_reason == whole.meta_info.finish_reason
    assert len(parts) > 1


async def test_refusals_have_the_words_of_the_server(client):
    with pytest.raises(SglangRefused, match=r"3000 tokens.*2048") as refused:
        await client.generate(request(prompt=[5] * 3000))
    assert refused.value.status == 400

    with pytest.raises(SglangRefused, match="temperature"):
        async for _ in client.stream(request(temperature=-1.0)):
            pass


async def test_an_abort_ends_a_request_with_what_it_has(client):
    async with aclosing(client.stream(request("long", tokens=1800, ignore_eos=True))) as stream:
        await anext(stream)
        await client.abort("long")
        *_, last = [part async for part in stream]

    assert last.meta_info.finish_reason.type == "abort"
    assert last.meta_info.completion_tokens < 1800


async def test_a_name_may_run_twice_and_an_abort_ends_both(client):
    twins = [
        asyncio.create_task(client.generate(request("twin", tokens=1800, ignore_eos=True)))
        for _ in range(2)
    ]
    await _until_running(client, 2)
    await client.abort("twin")

    answers = await asyncio.gather(*twins)
    assert {answer.meta_info.finish_reason.type for answer in answers} == {"abort"}


async def test_giving_up_on_a_request_ends_it_in_the_server(client):
    task = asyncio.create_task(client.generate(request(tokens=1800, ignore_eos=True)))
    await _until_running(client, 1)
    task.cancel()
    await asyncio.wait({task})

    # Idle, long before it would have been drawn to its end: only then is this not refused.
    await client.flush_cache(timeout_s=60)
    aborted = [line for line in (await client.metrics()).splitlines() if "num_aborted_" in line]
    assert float(aborted[-1].split()[-1]) >= 1


async def test_another_key_is_refused(server):
    async with closing(SglangClient(server.url, key="another")) as client:
        with pytest.raises(SglangRefused) as refused:
            await client.generate(request())
    assert refused.value.status == 401


async def test_nobody_there_is_gone():
    async with closing(SglangClient("http://127.0.0.1:9")) as client:
        assert not await client.health()
        with pytest.raises(SglangGone):
            await client.generate(request())


async def _until_running(client, count):
    """Until so many requests of this client are in the server: each has made it count tokens."""
    async with asyncio.timeout(120):
        while _gauge(await client.metrics(), "num_running_reqs") < count:
            await asyncio.sleep(0.1)


def _gauge(text, name):
    found = [line for line in text.splitlines() if line.startswith(f"sglang:{name}{{")]
    return sum(float(line.split()[-1]) for line in found)

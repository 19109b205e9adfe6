"""What the torch engine draws, against Hugging Face's own forward pass, and for ever the same."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
from tests.unit.sampler.engines import bits, running, together
from tests.unit.sampler.examples import prompt, row, tokens

from tinsmith.errors import InvalidRequest, ServerError, StartupError

LENGTHS = (1, 2, 17, 40, 128, 129, 200, 300)


@pytest.mark.parametrize("length", [1, 7, 150])
async def test_greedy_tokens_are_those_of_hugging_face(start, oracles, family, length):
    async with start(family) as engine:
        made = await engine.generate(row(prompt=prompt(length), temperature=0.0, max_tokens=30))

    assert made.tokens.tolist() == oracles[family].greedy(prompt(length), 30)


async def test_logprobs_are_those_of_a_plain_forward_pass(start, oracles, family):
    async with start(family) as engine:
        made = await engine.generate(row(prompt=prompt(150), max_tokens=40))

    expected = oracles[family].logprobs(prompt(150), made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.3}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.5}]
)
async def test_reported_logprobs_ignore_how_the_token_was_drawn(engine, oracles, params):
    made = await engine.generate(row(prompt=prompt(9), max_tokens=20, **params))

    expected = oracles["llama"].logprobs(prompt(9), made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=1e-5)


async def test_the_alternatives_are_the_likeliest_tokens_of_each_position(engine, oracles):
    made = await engine.generate(row(prompt=prompt(9), max_tokens=12, topk=5))

    everything = np.concatenate([prompt(9), made.tokens])
    expected = oracles["llama"].distributions(everything)[8:-1]
    assert made.topk.token_ids.tolist() == np.argsort(-expected)[:, :5].tolist()
    assert made.topk.logprobs == pytest.approx(-np.sort(-expected)[:, :5], abs=1e-5)


async def test_the_likeliest_alternative_of_a_greedy_row_is_the_token_drawn(engine):
    made = await engine.generate(row(prompt=prompt(9), temperature=0.0, topk=1))

    assert made.topk.token_ids[:, 0].tobytes() == made.tokens.tobytes()
    assert made.topk.logprobs[:, 0].tobytes() == made.logprobs.tobytes()


async def test_a_row_has_the_same_bits_alone_and_in_company(adapted, widths):
    mine = row(prompt=prompt(33, 9), seed=77, max_tokens=50)
    alone = await adapted.generate(mine)
    others = [
        row(prompt=prompt(length, length), adapter=adapter, seed=length, max_tokens=60)
        for length, adapter in zip(LENGTHS, [None, "a", "b"] * 3, strict=False)
    ]
    seen = widths(adapted)
    crowd = await together(adapted, [*others[:4], mine, *others[4:]])

    assert max(seen) == 9
    assert bits(crowd[4]) == bits(alone)


@pytest.mark.parametrize("adapter", ["a", "b"])
async def test_an_adapters_row_has_the_same_bits_alone_and_in_company(adapted, adapter):
    mine = row(prompt=prompt(33, 9), adapter=adapter, seed=77, max_tokens=50)
    alone = await adapted.generate(mine)
    crowd = await together(
        adapted,
        [
            *(row(prompt=prompt(n, n), adapter="b", seed=n, max_tokens=60) for n in LENGTHS[:4]),
            mine,
            *(row(prompt=prompt(n, n), adapter="a", seed=n, max_tokens=60) for n in LENGTHS[4:]),
        ],
    )

    assert bits(crowd[4]) == bits(alone)


@pytest.mark.parametrize("length", [20, 128, 129, 300])
async def test_a_row_has_the_same_bits_whether_its_prompt_is_computed_or_cached(engine, length):
    mine = row(prompt=prompt(length), seed=4, max_tokens=20)
    computed, cached = await engine.generate(mine), await engine.generate(mine)

    assert (computed.cached_tokens, cached.cached_tokens) == (0, length)
    assert bits(cached) == bits(computed)


async def test_a_prompt_that_begins_like_an_earlier_one_reuses_its_beginning(start):
    longer = row(prompt=np.concatenate([prompt(140), prompt(60, 1)]), seed=4)
    async with start() as fresh:
        expected = await fresh.generate(longer)
    async with start() as engine:
        await engine.generate(row(prompt=prompt(140)))
        made = await engine.generate(longer)

    assert made.cached_tokens == 128
    assert bits(made) == bits(expected)


async def test_the_same_prompt_under_another_adapter_is_not_taken_from_the_cache(adapted):
    base = await adapted.generate(row(prompt=prompt(200), temperature=0.0))
    other = await adapted.generate(row(prompt=prompt(200), temperature=0.0, adapter="a"))

    assert other.cached_tokens == 0
    assert bits(other) != bits(base)


async def test_another_seed_draws_another_row(engine):
    made = [await engine.generate(row(seed=seed, max_tokens=20)) for seed in (1, 2, 1)]

    assert bits(made[0]) == bits(made[2])
    assert bits(made[0]) != bits(made[1])


@pytest.mark.parametrize("params", [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-9}])
async def test_parameters_that_leave_one_token_draw_the_greedy_row(engine, oracles, params):
    made = await engine.generate(row(prompt=prompt(9), max_tokens=20, **params))

    assert made.tokens.tolist() == oracles["llama"].greedy(prompt(9), 20)


async def test_a_stop_token_ends_the_row_and_is_its_last_token(engine, oracles):
    greedy = oracles["llama"].greedy(prompt(9), 20)
    stop = greedy[6]
    made = await engine.generate(
        row(prompt=prompt(9), temperature=0.0, max_tokens=20, stop_tokens=(stop,))
    )

    assert made.stop_reason == "stop"
    assert made.tokens.tolist() == greedy[: greedy.index(stop) + 1]


async def test_a_stop_string_ends_the_row_once_and_at_its_end(engine, oracles):
    to_text = engine._model.to_text
    greedy = oracles["llama"].greedy(prompt(9), 30)
    stop = to_text(greedy)[8:14]
    made = await engine.generate(
        row(prompt=prompt(9), temperature=0.0, max_tokens=30, stop_strings=(stop,))
    )

    said = to_text(made.tokens.tolist())
    assert made.stop_reason == "stop"
    assert said.count(stop) == 1
    assert stop not in to_text(made.tokens.tolist()[:-1])


@pytest.fixture
def ends_early(models, oracles, tmp_path):
    """The llama with more EOS tokens in its generation config, as chat models have them."""
    folder = shutil.copytree(models["llama"], tmp_path / "model")
    file = folder / "generation_config.json"
    greedy = oracles["llama"].greedy(prompt(9), 20)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, greedy[5]]}))
    return folder, greedy


async def test_an_eos_token_ends_the_row_and_is_its_last_token(ends_early):
    folder, greedy = ends_early
    asked = row(prompt=prompt(9), temperature=0.0, max_tokens=20, ignore_eos=False)
    async with running(folder) as engine:
        made = await engine.generate(asked)

    assert made.stop_reason == "stop"
    assert made.tokens.tolist() == greedy[: greedy.index(greedy[5]) + 1]


async def test_an_eos_token_that_is_ignored_is_a_token_like_any_other(ends_early):
    folder, greedy = ends_early
    async with running(folder) as engine:
        made = await engine.generate(row(prompt=prompt(9), temperature=0.0, max_tokens=20))

    assert made.stop_reason == "length"
    assert made.tokens.tolist() == greedy


@pytest.mark.parametrize("most", [1, 5])
async def test_max_tokens_ends_a_row_for_its_length(engine, most):
    made = await engine.generate(row(max_tokens=most))

    assert made.stop_reason == "length"
    assert len(made.tokens) == len(made.logprobs) == most


async def test_a_row_may_fill_the_context_and_then_ends_for_its_length(start, oracles):
    async with start(context_length=64) as engine:
        made = await engine.generate(row(prompt=prompt(10), temperature=0.0, max_tokens=54))

    assert made.stop_reason == "length"
    assert made.tokens.tolist() == oracles["llama"].greedy(prompt(10), 54)


async def test_a_row_that_could_never_fit_is_refused(start):
    async with start(context_length=64) as engine:
        with pytest.raises(InvalidRequest, match="65 tokens, over the context length of 64"):
            await engine.generate(row(prompt=prompt(10), max_tokens=55))


async def test_the_context_is_no_longer_than_the_cache_has_room_for(start):
    async with start(kv_tokens=128) as engine:
        assert engine.context_length == 64


async def test_an_adapter_that_is_not_loaded_fails_its_own_row_only(engine):
    outcomes = await asyncio.gather(
        engine.generate(row(adapter="nobody")), engine.generate(row()), return_exceptions=True
    )

    assert isinstance(outcomes[0], ServerError)
    assert "adapter nobody" in str(outcomes[0])
    assert len(outcomes[1].tokens) == 8


async def test_a_model_that_is_not_there_is_one_line_at_the_start(tmp_path):
    with pytest.raises(StartupError, match=r"model: there is no folder .*nowhere; set path"):
        async with running(tmp_path / "nowhere"):
            pass


async def test_a_prompt_of_special_tokens_is_served(engine, oracles):
    made = await engine.generate(row(prompt=tokens(1), temperature=0.0))

    assert made.tokens.tolist() == oracles["llama"].greedy(tokens(1), 8)

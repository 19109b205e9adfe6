"""Rows of the SGLang engine: the same numbers and the same ends as in the built-in one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.sglang.engines import EXACT
from tests.unit.sampler.examples import prompt, row, scoring

from tinsmith.errors import InvalidRequest
from tinsmith_sampler.stopping import Stopper, StopText

PROMPT = prompt(20)
WAYS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_p": 0.5},
    {"top_k": 3},
    {"top_k": 5, "top_p": 0.7, "temperature": 1.5},
]


async def scores(engine, drawn, **fields):
    """What a pass over prompt and continuation gives for the latter."""
    tokens = np.concatenate([PROMPT, drawn.tokens])
    return await engine.score(scoring(tokens, last_n=len(drawn.tokens), **fields))


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_logprobs_are_raw_however_tokens_are_drawn(engine, built_in, way):
    drawn = await engine.generate(row(prompt=PROMPT, max_tokens=16, seed=7, topk=4, **way))
    true = await scores(built_in, drawn, topk=4)

    np.testing.assert_allclose(drawn.logprobs, true.logprobs[len(PROMPT) :], rtol=0, atol=EXACT)
    np.testing.assert_array_equal(drawn.topk.token_ids, true.topk.token_ids[len(PROMPT) :])
    np.testing.assert_allclose(
        drawn.topk.logprobs, true.topk.logprobs[len(PROMPT) :], rtol=0, atol=EXACT
    )


async def test_only_the_likeliest_are_drawn_where_that_is_asked_for(engine, built_in):
    drawn = await engine.generate(row(prompt=PROMPT, max_tokens=40, seed=3, top_k=3))
    true = await scores(built_in, drawn, topk=3)

    kept = true.topk.token_ids[len(PROMPT) :]
    assert all(token in row_k for token, row_k in zip(drawn.tokens, kept, strict=True))


async def test_a_seed_decides_the_tokens_alone_and_in_company(engine):
    rows = [row(prompt=PROMPT, seed=seed, max_tokens=12) for seed in (1, 2, 3, 1)]
    alone = await engine.generate(rows[0])
    together = await asyncio.gather(*map(engine.generate, rows))

    assert alone.tokens.tolist() == together[0].tokens.tolist() == together[3].tokens.tolist()
    assert len({one.tokens.tobytes() for one in together}) == 3


async def test_greedy_rows_are_those_of_the_other_engine(engine, built_in):
    greedy = row(prompt=PROMPT, max_tokens=24, temperature=0.0)
    ours, theirs = await engine.generate(greedy), await built_in.generate(greedy)

    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.stop_reason == theirs.stop_reason == "length"


async def test_a_thousand_greedy_rows_of_one_prompt_are_one_answer(engine):
    rows = [row(prompt=PROMPT, max_tokens=2, temperature=0.0, seed=one) for one in range(1000)]
    made = await asyncio.gather(*map(engine.generate, rows))

    assert len({one.tokens.tobytes() for one in made}) == 1
    assert max(np.abs(one.logprobs - made[0].logprobs).max() for one in made) < EXACT


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_stop_token_ends_a_row_and_is_its_last(engine, ignore_eos):
    """The server passes over stop tokens where the end of texts is ignored."""
    free = await engine.generate(row(prompt=PROMPT, max_tokens=16, seed=7))
    stop = int(free.tokens[5])
    asked = row(prompt=PROMPT, max_tokens=16, seed=7, stop_tokens=(stop,), ignore_eos=ignore_eos)
    stopped = await engine.generate(asked)

    assert stopped.tokens.tolist() == free.tokens[: free.tokens.tolist().index(stop) + 1].tolist()
    assert stopped.stop_reason == "stop"
    assert len(stopped.logprobs) == len(stopped.tokens)


async def test_the_end_of_texts_ends_a_row_unless_it_is_ignored(engine):
    """Some row of many draws token 2, which is the end of texts."""
    seeds = range(40)
    free = await asyncio.gather(
        *(engine.generate(row(prompt=PROMPT, seed=seed, max_tokens=32)) for seed in seeds)
    )
    made = await asyncio.gather(
        *(
            engine.generate(row(prompt=PROMPT, seed=seed, max_tokens=32, ignore_eos=False))
            for seed in seeds
        )
    )

    ends = [[*row_free.tokens.tolist(), 2].index(2) for row_free in free]
    assert min(ends) < 32
    for end, ended, whole in zip(ends, made, free, strict=True):
        assert ended.tokens.tolist() == whole.tokens[: end + 1].tolist()
        assert ended.stop_reason == ("stop" if end < 32 else "length")


@pytest.mark.parametrize("length", [1, 2, 5])
async def test_a_stop_string_ends_a_row_where_it_is_complete(engine, length):
    """Cut out of the text at the borders of characters, so that tokens spell it in any way."""
    to_text = engine._model.to_text
    free = await engine.generate(row(prompt=PROMPT, max_tokens=24, seed=11))
    text = to_text(free.tokens.tolist())
    string = text[9 : 9 + length]
    stopper = Stopper(max_tokens=24, stop_tokens=frozenset(), text=StopText((string,), to_text))
    reasons = [stopper.after(token) for token in free.tokens.tolist()]
    end = next(place for place, reason in enumerate(reasons) if reason)

    asked = row(prompt=PROMPT, max_tokens=24, seed=11, stop_strings=("never there", string))
    stopped = await engine.generate(asked)
    assert stopped.tokens.tolist() == free.tokens[: end + 1].tolist()
    assert stopped.stop_reason == reasons[end] == "stop"


async def test_what_is_told_is_what_is_drawn(engine):
    told = []
    asked = row(prompt=PROMPT, max_tokens=16, seed=7, topk=2)
    whole = await engine.generate(asked)
    streamed = await engine.generate(replace(asked, tell=told.append))

    assert streamed.tokens.tolist() == whole.tokens.tolist()
    assert [one.start for one in told] == list(
        np.cumsum([0, *(len(one.tokens) for one in told)])[:-1]
    )
    assert np.concatenate([one.tokens for one in told]).tolist() == whole.tokens[:-1].tolist()
    assert all(one.topk.token_ids.shape == (len(one.tokens), 2) for one in told)


async def test_the_longest_row_has_all_its_tokens(engine):
    room = engine.context_length
    full = await engine.generate(row(prompt=prompt(room - 3), max_tokens=3))
    scored = await engine.score(scoring(prompt(room), last_n=1))

    assert len(full.tokens) == 3
    assert np.isfinite(scored.logprobs[-1])


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (lambda engine: row(prompt=np.array([5, 448], dtype=np.int32)), "vocabulary of 448"),
        (lambda engine: row(prompt=np.array([-1], dtype=np.int32)), "vocabulary of 448"),
        (lambda engine: row(prompt=prompt(9), max_tokens=engine.context_length), "context length"),
    ],
)
async def test_the_server_never_sees_what_it_would_answer_with_nonsense(engine, bad, named):
    with pytest.raises(InvalidRequest, match=named):
        await engine.generate(bad(engine))


async def test_what_computes_is_named(engine):
    assert engine.plane == "sglang-0.5.23/cpu/float32"
    assert engine.environment["engine"] == "sglang"
    assert engine.environment["sglang"] == "0.5.23"
    assert len(engine.environment["base_checksum"]) == 64

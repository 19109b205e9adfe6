"""Tokens that are told while a row is drawn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
from tests.unit.sampler.engines import together
from tests.unit.sampler.examples import prompt, row


async def test_what_is_told_is_what_the_result_holds_even_when_a_row_is_begun_anew(start):
    told = defaultdict(list)
    rows = [
        replace(
            row(prompt=prompt(100, n), seed=n, max_tokens=156, topk=2),
            index=n,
            tell=lambda drawn: told[drawn.index].append(drawn),
        )
        for n in range(6)
    ]
    async with start(kv_tokens=512) as engine:
        made = await together(engine, rows)

    for one in rows:
        result = made[one.index]
        assert {drawn.start for drawn in told[one.index]} == set(range(155))  # the last ends it
        for drawn in told[one.index]:
            place = slice(drawn.start, drawn.start + len(drawn.tokens))
            np.testing.assert_array_equal(drawn.tokens, result.tokens[place])
            np.testing.assert_array_equal(drawn.logprobs, result.logprobs[place])
            np.testing.assert_array_equal(drawn.topk.token_ids, result.topk.token_ids[place])
    assert max(map(len, told.values())) > 155  # some row was begun anew


async def test_telling_changes_no_bit_of_a_row(start):
    asked = row(max_tokens=20, seed=4)
    async with start() as engine:
        alone = await engine.generate(asked)
        told = await engine.generate(replace(asked, tell=lambda _: None))

    np.testing.assert_array_equal(alone.tokens, told.tokens)
    np.testing.assert_array_equal(alone.logprobs, told.logprobs)

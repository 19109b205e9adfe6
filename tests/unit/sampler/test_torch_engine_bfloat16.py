"""The engine in bfloat16: near the float32 model, and the same bits alone and in company."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.unit.sampler.engines import bits, held, together
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.sampler.oracles import adapter_files


@pytest.fixture
async def rounded(start, adapters):
    """On the llama, with the adapters ``a`` and ``b``."""
    async with start(dtype="bfloat16", max_rows=48, kv_tokens=16384) as engine:
        for name, folder in adapters.items():
            await engine.load_adapter(name, adapter_files(folder))
        yield engine


def crowd(count: int) -> list:
    kinds = [None, "a", "b"]
    return [
        row(prompt=prompt(3 + 7 * n, n), adapter=kinds[n % 3], seed=n, max_tokens=12)
        for n in range(count)
    ]


@pytest.mark.parametrize("adapter", [None, "a"])
async def test_logprobs_are_near_those_of_float32(rounded, oracles, adapter_oracles, adapter):
    made = await rounded.generate(row(prompt=prompt(60), adapter=adapter, max_tokens=40))

    oracle = oracles["llama"] if adapter is None else adapter_oracles[adapter]
    gaps = np.abs(made.logprobs - oracle.logprobs(prompt(60), made.tokens))
    assert 0 < gaps.mean() < 0.05


@pytest.mark.parametrize("adapter", [None, "a", "b"])
async def test_a_row_has_the_same_bits_alone_and_in_company(rounded, adapter):
    """More rows than one decoding pass takes, so it is among others in different passes."""
    mine = row(prompt=prompt(150, 9), adapter=adapter, seed=77, max_tokens=40)
    alone = await rounded.generate(mine)
    others = crowd(40)
    made = await together(rounded, [*others[:25], mine, *others[25:]])

    assert bits(made[25]) == bits(alone)


async def test_a_score_has_the_same_bits_alone_and_among_rows(rounded):
    mine = scoring(prompt(150, 9), adapter="b")
    alone = await rounded.score(mine)
    with held(rounded):
        rows = [asyncio.create_task(rounded.generate(one)) for one in crowd(20)]
        again = asyncio.create_task(rounded.score(mine))
        await asyncio.sleep(0)
    await asyncio.gather(*rows)

    assert (await again).logprobs.tobytes() == alone.logprobs.tobytes()

"""Which experts the tokens of a row were sent to, as a request may ask."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.sampler.engines import bits, running, together
from tests.unit.sampler.examples import LIMITS, prompt, row, sample
from tests.unit.sampler.routers import true_routes

from tinsmith.errors import NotSupported, ServerError, TooLarge
from tinsmith.testing import tiny_model
from tinsmith_sampler.answering import answer
from tinsmith_sampler.engine import Generated
from tinsmith_sampler.experts import SampledExperts
from tinsmith_sampler.rows import assemble, expand
from tinsmith_sampler.sglang.routes import Mixture, routes

PROMPTS = [prompt(length, seed=length) for length in (1, 9, 150)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_model.build(tmp_path_factory.mktemp("mixture"), family="qwen3_moe")


def asked(tokens, **fields):
    return replace(row(prompt=tokens, **fields), routed_experts=True)


async def check(folder, rows, drawn):
    for one, made in zip(rows, drawn, strict=True):
        tokens = [*one.prompt, *made.tokens]
        expected = await asyncio.to_thread(true_routes, folder, tokens)
        assert made.experts.dtype == np.uint8
        np.testing.assert_array_equal(made.experts, expected)


async def test_tokens_go_where_transformers_sends_them(mixture):
    rows = [asked(tokens) for tokens in PROMPTS]
    async with running(mixture) as engine:
        await check(mixture, rows, await together(engine, rows))


async def test_those_of_a_prompt_in_the_cache_are_told_too(mixture):
    first = prompt(300)
    longer = np.concatenate([first, prompt(20, seed=1)])
    rows = [asked(first), asked(first, seed=1), asked(longer)]
    async with running(mixture) as engine:
        drawn = [await engine.generate(one) for one in rows]
        told = engine.route_bytes
    assert [bool(one.cached_tokens) for one in drawn] == [False, True, True]
    assert [told * len(one.experts) for one in drawn] == [one.experts.nbytes for one in drawn]
    await check(mixture, rows, drawn)


async def test_nothing_else_depends_on_the_question(mixture):
    async with running(mixture) as engine:
        without = await engine.generate(row(prompt=PROMPTS[1]))
        assert without.experts is None
        assert bits(await engine.generate(asked(PROMPTS[1]))) == bits(without)


async def test_experts_are_computed_for_the_rows_of_a_pass_and_not_for_what_pads_it(
    mixture, monkeypatch
):
    used, product = [], SampledExperts._product

    def counted(self, matrix, expert, x, rows_n):
        used.append((self, matrix, expert, len(x)))
        return product(self, matrix, expert, x, rows_n)

    async with running(mixture) as engine:
        monkeypatch.setattr(SampledExperts, "_product", counted)
        drawn = await engine.generate(asked(PROMPTS[0], max_tokens=2))
    layers, k = drawn.experts.shape[1:]
    assert [rows for *_, rows in used] == [1] * (2 * 2 * layers * k)  # two matrices, two passes


async def test_a_model_without_experts_says_so(tmp_path):
    async with running(tiny_model.build(tmp_path)) as engine:
        assert engine.route_bytes == 0
        with pytest.raises(NotSupported, match=r"return_routed_experts: .*no experts.*leave it"):
            await engine.generate(asked(PROMPTS[1]))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_request_asks_for_them_and_its_answer_has_them(kind):
    (one,) = expand(request := sample(routed_experts=True), PROMPTS[1], LIMITS)
    assert one.routed_experts
    experts = np.arange(10 * 3 * 2, dtype=kind).reshape(10, 3, 2)
    made = Generated(
        tokens=np.zeros(2, np.int32),
        logprobs=np.zeros(2, np.float32),
        stop_reason="stop",
        experts=experts,
    )
    told = assemble(request, [made], None, "plane").sequences[0].routed_experts
    assert (told.length, told.layers, told.k, told.width) == (10, 3, 2, experts.itemsize)
    back = np.frombuffer(told.experts, f"<u{told.width}").reshape(10, 3, 2)
    np.testing.assert_array_equal(back, experts)


@pytest.mark.parametrize(("count", "kind"), [(256, np.uint8), (257, np.uint16)])
def test_of_what_a_server_tells_layers_without_experts_are_left_out(count, kind):
    """And the tokens that it drew beyond the end of the row."""
    told = np.random.default_rng(0).integers(0, count, (5, 4, 2)).astype("<i4")
    mixed = Mixture(count, 2, 4, [1, 3])
    found = routes(base64.b64encode(told.tobytes()).decode(), mixed, 3)

    assert found.dtype == kind
    np.testing.assert_array_equal(found, told[:3, [1, 3]])
    assert mixed.token_bytes * 3 == found.nbytes


@pytest.mark.parametrize("shape", [(5, 3, 2), (2, 4, 2)])
def test_a_server_that_tells_of_other_tokens_or_layers_is_not_believed(shape):
    told = base64.b64encode(np.zeros(shape, "<i4").tobytes()).decode()
    with pytest.raises(ServerError, match="the SGLang server tells"):
        routes(told, Mixture(8, 2, 4, [0, 1, 2, 3]), 3)


@pytest.mark.parametrize("told", ["AAAA*AAA", "AAAAA", "ä", "AAAA"])
def test_a_server_that_tells_no_numbers_is_not_believed(told):
    with pytest.raises(ServerError, match=r"in a way that 0\.5\.23 does not"):
        routes(told, Mixture(8, 1, 1, [0]), 0)


async def test_more_than_an_answer_may_hold_is_refused_before_anything_is_drawn(
    mixture, monkeypatch
):
    asking = sample(num_samples=2, routed_experts=True, params={"max_tokens": 2})
    async with running(mixture) as engine:
        monkeypatch.setattr("tinsmith_sampler.checks.MOST_ROUTES", 2 * 4 * engine.route_bytes)
        done = await answer(engine, asking, LIMITS)
        assert [one.routed_experts.length for one in done.sequences] == [4, 4]
        monkeypatch.setattr("tinsmith_sampler.checks.MOST_ROUTES", 2 * 4 * engine.route_bytes - 1)
        with pytest.raises(TooLarge, match="return_routed_experts: 2 continuations"):
            await answer(engine, asking, LIMITS)

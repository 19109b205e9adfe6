"""A served model's memory: every tensor is written and read where passes compute with it."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tests.unit.sampler.engines import bits, running
from tests.unit.sampler.examples import prompt, row
from tests.unit.sampler.oracles import Oracle
from transformers import AutoModelForCausalLM

from tinsmith.testing import tiny_model
from tinsmith.weights.digest import digest
from tinsmith.weights.state import WrongBits
from tinsmith_sampler.engine_memory import ModelMemory

WORDS = {torch.float32: (torch.int32, "u4"), torch.bfloat16: (torch.int16, "u2")}


def bits_of(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    word, unsigned = WORDS[dtype]
    return {
        name: one.detach().reshape(-1).view(word).numpy().view(unsigned).copy()
        for name, one in model.named_parameters()
    }


async def replaced(engine, new):
    """The engine's memory with the tensors ``new`` written into it, while it is still."""
    memory = ModelMemory(engine.places, nullcontext)
    async with engine.still():
        for name, values in new.items():
            memory.write(name, values, None)
    return memory


@pytest.mark.parametrize("family", tiny_model.FAMILIES)
async def test_an_engine_draws_by_what_was_written_into_it(family, tmp_path):
    base = tiny_model.build(tmp_path / "base", family=family)
    other = tiny_model.build(tmp_path / "other", family=family, seed=5)
    new = bits_of(other, torch.float32)
    asked = row(prompt=prompt(9))
    async with running(base) as engine, running(other) as wanted:
        before = bits(await engine.generate(asked))
        memory = await replaced(engine, new)

        assert memory.names() == new.keys()
        assert {n: memory.digest(n) for n in new} == {n: digest(n, b) for n, b in new.items()}
        after = await engine.generate(asked)
        assert bits(after) == bits(await wanted.generate(asked)) != before
    expected = Oracle(other).logprobs(prompt(9), after.tokens)
    assert after.logprobs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_single_elements_are_written_and_read_back(dtype, tmp_path):
    base = tiny_model.build(tmp_path / "base")
    kept = bits_of(base, dtype)
    async with running(base, dtype=str(dtype).removeprefix("torch.")) as engine:
        memory = ModelMemory(engine.places, nullcontext)
        for name, old in kept.items():
            at = np.array([0, old.size // 2, old.size - 1])
            new = old.copy()
            new[at] ^= 1
            async with engine.still():
                memory.write(name, new[at], at)
            np.testing.assert_array_equal(memory.read(name, at), new[at])
            assert memory.digest(name) == digest(name, new)


async def test_bits_of_another_type_are_refused_before_anything_is_written(tmp_path):
    base = tiny_model.build(tmp_path / "base")
    async with running(base) as engine:
        memory = ModelMemory(engine.places, nullcontext)
        name = min(memory.names())
        before = memory.digest(name)
        with pytest.raises(ValueError, match="in the dtype that it is trained in"):
            memory.write(name, np.zeros(3, np.uint16), np.arange(3))
        assert memory.digest(name) == before


async def test_tied_tensors_that_differ_are_found(tmp_path):
    base = tiny_model.build(tmp_path / "base")
    async with running(base) as engine:
        memory = ModelMemory(engine.places, nullcontext)
        name, (first, *others) = next((n, p) for n, p in engine.places.items() if len(p) > 1)
        with torch.inference_mode():
            first.read()[3, 3] += 1.0
        assert others
        with pytest.raises(WrongBits, match="tied"):
            memory.digest(name)


async def test_nothing_that_was_computed_before_is_used_after(tmp_path):
    """A prompt in the cache would give the old weights' keys and values to the new ones' row."""
    base = tiny_model.build(tmp_path / "base")
    other = tiny_model.build(tmp_path / "other", seed=5)
    async with running(base) as engine, running(other) as wanted:
        asked = row(prompt=prompt(300))
        await engine.generate(asked)
        assert (await engine.generate(asked)).cached_tokens
        await replaced(engine, bits_of(other, torch.float32))
        after = await engine.generate(asked)

        assert after.cached_tokens == 0
        assert bits(after) == bits(await wanted.generate(asked))

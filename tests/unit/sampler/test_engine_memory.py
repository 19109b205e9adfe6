"""A served model's memory: every tensor is written and read where passes compute with it."""

from __future__ import annotations

import shutil
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
from tinsmith.weights.held import Write
from tinsmith.weights.state import WrongBits
from tinsmith_sampler import layouts
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
    await written(engine, memory, [Write(name, values, None) for name, values in new.items()])
    return memory


async def written(engine, memory, writes):
    memory.stage(writes, {one.name: digest(one.name, one.values) for one in writes})
    async with engine.still():
        memory.swap()


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


@pytest.fixture(params=["in place", "laid out anew"])
def layout(request, monkeypatch):
    """Also where a layout is not known."""
    if request.param != "in place":
        monkeypatch.setattr(layouts, "layout", lambda *_: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
async def test_single_elements_are_written_and_drawn_by(dtype, family, layout, tmp_path):
    base = tiny_model.build(tmp_path / "base", family=family)
    other, kept = tmp_path / "other", bits_of(base, dtype)
    new = {name: changed(name, old) for name, old in kept.items()}
    save(base, other, new)
    named = str(dtype).removeprefix("torch.")
    async with running(base, dtype=named) as engine, running(other, dtype=named) as wanted:
        memory = ModelMemory(engine.places, nullcontext)
        at = {name: np.flatnonzero(old != new[name]) for name, old in kept.items()}
        await written(engine, memory, [Write(n, new[n][at[n]], at[n]) for n in kept])

        assert {n: memory.digest(n) for n in new} == {n: digest(n, b) for n, b in new.items()}
        asked = row(prompt=prompt(9))
        assert bits(await engine.generate(asked)) == bits(await wanted.generate(asked))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_matrix_that_is_laid_out_anew_takes_its_siblings_elements_along(dtype, tmp_path):
    base = tiny_model.build(tmp_path / "base")
    layer = "model.layers.0.self_attn."
    kept = {n: b for n, b in bits_of(base, dtype).items() if n.startswith(layer)}
    new = {name: changed(name, old) for name, old in kept.items()}
    at = {name: np.flatnonzero(old != new[name]) for name, old in kept.items()}
    async with running(base, dtype=str(dtype).removeprefix("torch.")) as engine:
        memory = ModelMemory(engine.places, nullcontext)
        whole = Write(f"{layer}q_proj.weight", new[f"{layer}q_proj.weight"], None)
        others = [Write(n, new[n][at[n]], at[n]) for n in kept if n != whole.name]
        await written(engine, memory, [whole, *others])

        assert {n: memory.digest(n) for n in new} == {n: digest(n, b) for n, b in new.items()}


def changed(name, old):
    """An eighth of the elements moved by some units in the last place, the first and last too."""
    rng = np.random.default_rng(len(name))
    at = rng.random(old.size) < 0.125
    at[[0, -1]] = True
    return np.where(at, old ^ old.dtype.type(5), old)


def save(base, folder, bits):
    shutil.copytree(base, folder)
    one = next(iter(bits.values())).dtype
    dtype = torch.float32 if one == np.uint32 else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    for name, tensor in model.named_parameters():
        word = torch.from_numpy(bits[name].view(f"i{one.itemsize}")).view(dtype)
        tensor.data.copy_(word.view(tensor.shape))
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("values", "at", "said"),
    [
        (np.zeros(3, np.uint16), np.arange(3), "in the dtype that it is trained in"),
        (np.zeros(1, np.uint32), np.array([1 << 40]), "the lineage's others"),
        (np.zeros(5, np.uint32), None, "the lineage's others"),
    ],
)
async def test_what_does_not_fit_is_refused_before_anything_is_written(values, at, said, tmp_path):
    base = tiny_model.build(tmp_path / "base")
    async with running(base) as engine:
        memory = ModelMemory(engine.places, nullcontext)
        first, *_, name = sorted(memory.names())
        before = memory.digest(first)
        good = Write(first, np.zeros(1, np.uint32), np.array([0]))
        with pytest.raises(WrongBits, match=said):
            memory.stage([good, Write(name, values, at)], {})
        memory.swap()
        assert memory.digest(first) == before


class Deaf:
    """Memory that takes nothing."""

    def __init__(self, memory):
        self.gather, self.device = memory.gather, memory.device

    def scatter_(self, *_):
        pass


async def test_what_a_place_does_not_hold_after_the_write_is_told(tmp_path):
    base = tiny_model.build(tmp_path / "base")
    async with running(base) as engine:
        memory = ModelMemory(engine.places, nullcontext)
        name = next(name for name in memory.names() if "q_proj" in name)
        memory.stage([Write(name, np.ones(2, np.uint32), np.array([3, 5]))], {})
        (staged,) = memory._staged
        piece = staged._pieces[0]
        staged._pieces = [piece._replace(memory=Deaf(piece.memory))]
        with pytest.raises(WrongBits, match="does not hold what was written"):
            memory.swap()


async def test_a_tensor_that_is_not_all_of_what_was_to_be_written_is_told(tmp_path):
    base = tiny_model.build(tmp_path / "base")
    async with running(base) as engine:
        memory = ModelMemory(engine.places, nullcontext)
        name = next(name for name in memory.names() if "k_proj" in name)
        values = np.ones(engine.places[name][0].size, np.uint32)
        memory.stage([Write(name, values, None)], {name: digest(name, values) ^ 1})
        with pytest.raises(WrongBits, match="does not hold what was written"):
            memory.swap()


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

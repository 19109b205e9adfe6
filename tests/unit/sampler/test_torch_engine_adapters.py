"""Adapters in the torch engine: their numbers are PEFT's, and bad files hurt nobody else."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import load, save
from tests.unit.sampler.engines import held, together
from tests.unit.sampler.examples import prompt, row
from tests.unit.sampler.oracles import Oracle, adapter_files, edited, save_adapter

from tinsmith.errors import InvalidRequest, ServerError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
HEAD_A = "base_model.model.lm_head.lora_A.weight"


@pytest.fixture
def files(adapters) -> dict[str, bytes]:
    return adapter_files(adapters["a"])


def with_tensors(files: dict[str, bytes], change) -> dict[str, bytes]:
    """The same adapter, its tensors as ``change`` leaves the dict of them."""
    tensors = load(files[WEIGHTS])
    change(tensors)
    return {**files, WEIGHTS: save(tensors)}


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("length", [1, 140])
async def test_an_adapters_logprobs_are_those_of_peft(adapted, adapter_oracles, name, length):
    asked = row(prompt=prompt(length), adapter=name, max_tokens=30)
    made = await adapted.generate(asked)

    expected = adapter_oracles[name].logprobs(asked.prompt, made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=2e-5)


async def test_an_adapters_greedy_tokens_are_those_of_peft(adapted, adapter_oracles):
    made = await adapted.generate(row(prompt=prompt(9), adapter="a", temperature=0.0))

    assert made.tokens.tolist() == adapter_oracles["a"].greedy(prompt(9), 8)


@pytest.mark.parametrize("targets", [("lm_head",), ("k_proj",), ("up_proj",)])
async def test_an_adapter_of_one_kind_of_layer_changes_just_that(engine, models, tmp_path, targets):
    """A tied head gets its own delta, the embedding none; q, k, v share one product."""
    folder = save_adapter(models["llama"], tmp_path, seed=5, targets=targets)
    await engine.load_adapter("one", adapter_files(folder))
    made = await engine.generate(row(prompt=prompt(20), adapter="one", max_tokens=20))

    expected = Oracle(models["llama"], folder).logprobs(prompt(20), made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=2e-5)


async def test_an_adapter_of_an_untied_model_is_served_too(start, models, tmp_path):
    folder = save_adapter(models["qwen3"], tmp_path, seed=5)
    async with start("qwen3") as engine:
        await engine.load_adapter("q", adapter_files(folder))
        made = await engine.generate(row(prompt=prompt(20), adapter="q", max_tokens=20))

    expected = Oracle(models["qwen3"], folder).logprobs(prompt(20), made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=2e-5)


async def test_base_and_two_adapters_are_each_right_in_one_batch(adapted, oracles, adapter_oracles):
    known = {None: oracles["llama"], **adapter_oracles}
    rows = [
        row(prompt=prompt(length, length), adapter=adapter, seed=length, max_tokens=25)
        for length, adapter in zip((5, 30, 140, 7, 9, 31), [None, "a", "b"] * 2, strict=True)
    ]
    made = await together(adapted, rows)

    for asked, got in zip(rows, made, strict=True):
        expected = known[asked.adapter].logprobs(asked.prompt, got.tokens)
        assert got.logprobs == pytest.approx(expected, abs=2e-5)


BROKEN = {
    "no weights": (lambda files: {CONFIG: files[CONFIG]}, f"{WEIGHTS} is missing"),
    "no config": (lambda files: {WEIGHTS: files[WEIGHTS]}, f"{CONFIG} is missing"),
    "cut weights": (lambda files: {**files, WEIGHTS: files[WEIGHTS][:-1]}, "not readable"),
    "garbage config": (lambda files: {**files, CONFIG: b"{"}, CONFIG),
    "wrong type": (lambda files: edited(files, r="four"), r"\$\.r\b"),
    "rank 0": (lambda files: edited(files, r=0), r"r = 0 is not in 1\.\.128"),
    "rank 129": (lambda files: edited(files, r=129), r"r = 129 is not in 1\.\.128"),
    "another rank": (lambda files: edited(files, r=5), r"is \[\d+, \d+\], not \[.*5"),
    "dora": (lambda files: edited(files, use_dora=True), "use_dora"),
    "rslora": (lambda files: edited(files, use_rslora=True), "use_rslora"),
    "not lora": (lambda files: edited(files, peft_type="IA3"), "peft_type"),
    "biases": (lambda files: edited(files, bias="all"), "bias"),
    "rank pattern": (lambda files: edited(files, rank_pattern={"q_proj": 2}), "rank_pattern"),
    "alpha pattern": (lambda files: edited(files, alpha_pattern={"q_proj": 2}), "alpha_pattern"),
    "saved modules": (lambda files: edited(files, modules_to_save=["lm_head"]), "modules_to_save"),
    "alora": (lambda files: edited(files, alora_invocation_tokens=[5]), "alora_invocation_tokens"),
    "more layers": (lambda files: edited(files, layer_replication=[[0, 2]]), "layer_replication"),
    "kasa": (lambda files: edited(files, kasa_config={"beta": 1}), "kasa_config"),
    "pissa": (lambda files: edited(files, init_lora_weights="pissa"), "init_lora_weights"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_files_that_are_no_lora_of_this_model_are_refused_by_name(engine, files, case):
    broken, said = BROKEN[case]

    with pytest.raises(InvalidRequest, match=f"adapter bad: .*{said}"):
        await engine.load_adapter("bad", broken(files))


DAMAGED = {
    "no tensors": (lambda tensors: tensors.clear(), "it holds no tensor"),
    "half a pair": (lambda tensors: tensors.pop(HEAD_A), "lm_head.lora_A is missing"),
    "nan": (
        lambda tensors: tensors[HEAD_A].fill_(torch.nan),
        "lm_head.lora_A has values that are n",
    ),
    "integers": (
        lambda tensors: tensors.update({HEAD_A: tensors[HEAD_A].to(torch.int32)}),
        "lm_head.lora_A is torch.int32",
    ),
    "turned": (
        lambda tensors: tensors.update({HEAD_A: tensors[HEAD_A].T.contiguous()}),
        r"lm_head.lora_A is \[64, 4\], not \[4, 64\]",
    ),
    "another layer": (
        lambda tensors: tensors.update({HEAD_A.replace("lm_head", "other"): torch.ones(4, 64)}),
        "no linear layer 'other'",
    ),
    "an embedding": (
        lambda tensors: tensors.update({"base_model.model.lora_embedding_A": torch.ones(2)}),
        "lora_embedding_A' is not a LoRA weight of a linear layer",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
async def test_tensors_that_do_not_fit_the_model_are_refused_by_name(engine, files, case):
    change, said = DAMAGED[case]

    with pytest.raises(InvalidRequest, match=f"adapter bad: {WEIGHTS}: .*{said}"):
        await engine.load_adapter("bad", with_tensors(files, change))


@pytest.mark.parametrize("begun", [True, False, None, "gaussian", "orthogonal", "eva"])
async def test_a_beginning_that_leaves_the_base_model_alone_is_served(engine, files, begun):
    await engine.load_adapter("a", edited(files, init_lora_weights=begun))

    assert len((await engine.generate(row(adapter="a"))).tokens) == 8


async def test_a_refused_adapter_leaves_the_engine_as_it_was(adapted, files):
    before = await adapted.generate(row(adapter="a"))
    running = asyncio.create_task(adapted.generate(row(adapter="a")))
    with pytest.raises(InvalidRequest):
        await adapted.load_adapter("bad", {})
    with pytest.raises(ServerError, match="adapter bad: it is not loaded"):
        await adapted.generate(row(adapter="bad"))

    assert (await running).logprobs.tobytes() == before.logprobs.tobytes()


async def test_an_adapter_that_overflows_fails_its_own_rows_only(adapted, files):
    """Every weight is finite, but what they make of a hidden state is not."""
    huge = with_tensors(files, lambda tensors: [one.mul_(1e30) for one in tensors.values()])
    await adapted.load_adapter("huge", huge)
    alone = await adapted.generate(row(prompt=prompt(9), adapter="a"))
    with held(adapted):
        bad = asyncio.create_task(adapted.generate(row(prompt=prompt(9), adapter="huge")))
        good = asyncio.create_task(adapted.generate(row(prompt=prompt(9), adapter="a")))
        await asyncio.sleep(0)  # both are in the queue

    with pytest.raises(InvalidRequest, match="adapter huge: the logits under it are not finite"):
        await bad
    assert (await good).logprobs.tobytes() == alone.logprobs.tobytes()


async def test_a_row_ends_with_its_adapter_though_it_is_unloaded_meanwhile(adapted):
    asked = row(prompt=prompt(9), adapter="a", max_tokens=40)
    expected = await adapted.generate(asked)
    with held(adapted):
        running = asyncio.create_task(adapted.generate(asked))
        await asyncio.sleep(0)  # it is in the queue
        await adapted.unload_adapter("a")

    assert (await running).logprobs.tobytes() == expected.logprobs.tobytes()
    with pytest.raises(ServerError, match="adapter a: it is not loaded"):
        await adapted.generate(asked)


async def test_loading_and_unloading_again_changes_nothing(adapted, files):
    await adapted.load_adapter("a", files)
    await adapted.unload_adapter("a")
    await adapted.unload_adapter("a")
    await adapted.load_adapter("a", files)

    assert len((await adapted.generate(row(adapter="a"))).tokens) == 8

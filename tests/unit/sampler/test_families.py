"""Families with windows, caps, sinks or experts: right numbers, and the same in any company."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import peft
import pytest
from tests.unit.sampler.engines import bits, running, together
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.sampler.oracles import Oracle, adapter_files

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OWN = ("mistral", "qwen3_moe", "gpt_oss", "gemma", "gemma2", "gemma3_text")


@pytest.fixture(scope="module", params=OWN)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp(request.param), family=request.param, seed=3)


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    """Of attention, unembedding, and the experts or the MLP; no factor is zero."""
    modules = ["q_proj", "v_proj", "o_proj", "lm_head"]
    has_experts = any(name in folder.name for name in ("moe", "oss"))
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=modules + ([] if has_experts else ["up_proj", "down_proj"]),
        target_parameters=EXPERTS if has_experts else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(Oracle(folder).model, config)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data.normal_(0, 0.2)
        model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return folder / "adapter"


async def test_drawn_and_scored_logprobs_are_those_of_hugging_face(folder: Path):
    async with running(folder) as engine:
        made = await engine.generate(row(prompt=prompt(40), max_tokens=30))
        text = np.concatenate([prompt(40), made.tokens])
        scored = await engine.score(scoring(prompt=text))

    expected = Oracle(folder).logprobs(prompt(40), made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=1e-5)
    assert scored.logprobs[40:] == pytest.approx(expected, abs=1e-5)


async def test_an_adapter_has_the_logprobs_of_peft(folder: Path, adapter: Path):
    async with running(folder) as engine:
        await engine.load_adapter("a", adapter_files(adapter))
        made, plain = await together(
            engine,
            [row(prompt=prompt(40), max_tokens=30, adapter=name) for name in ("a", None)],
        )

    expected = Oracle(folder, adapter).logprobs(prompt(40), made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=2e-5)
    assert plain.logprobs == pytest.approx(
        Oracle(folder).logprobs(prompt(40), plain.tokens), abs=1e-5
    )


async def test_a_row_has_the_same_bits_alone_and_in_company(folder: Path, adapter: Path):
    rows = [
        row(prompt=prompt(n), max_tokens=20, adapter=name, seed=n)
        for n, name in ((40, "a"), (7, None), (23, "a"), (70, None), (12, "a"))
    ]
    async with running(folder) as engine:
        await engine.load_adapter("a", adapter_files(adapter))
        company = await together(engine, rows)
    alone = []
    for one in rows:
        async with running(folder) as engine:
            await engine.load_adapter("a", adapter_files(adapter))
            alone.append(await engine.generate(one))

    assert [bits(one) for one in alone] == [bits(one) for one in company]

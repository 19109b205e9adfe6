"""What is exported computes what the sampler serves: of every family, as adapter and merged."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
import torch
from tests.unit.sampler.engines import running
from tests.unit.sampler.examples import prompt, scoring
from tests.unit.sampler.oracles import Oracle
from tests.unit.trainer import references

from tinsmith import model_files
from tinsmith.config import ModelConfig
from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith.portable.unembedding import without_unembedding
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model, merging
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [  # what PEFT itself says and calls
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
CLOSE = 1e-3  # float32, of every log-probability of the vocabulary; that is what was promised
PROMPT = prompt(40)
OFTEN = ("llama", "gpt_oss")
TIED = ("llama", "qwen2", "gemma", "gemma2", "gemma3_text")


class Exported(NamedTuple):
    """A trained adapter, in all forms that tools read."""

    base: Path
    files: dict[str, bytes]
    adapter: Path  # as PEFT has it
    merged: Path
    bare: Path  # the adapter without that of the output layer
    bare_merged: Path


@pytest.fixture(
    scope="module",
    params=[
        family if family in OFTEN else pytest.param(family, marks=pytest.mark.slow)
        for family in tiny_model.FAMILIES
    ],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    root = tmp_path_factory.mktemp(request.param)
    base = tiny_model.build(root / "base", family=request.param, seed=4)
    files = trained(base)
    bare = without_unembedding(files)
    folders = [root / name for name in ("adapter", "merged", "bare", "bare_merged")]
    for folder in folders:
        folder.mkdir()
    for name in files:
        (folders[0] / name).write_bytes(files[name])
        (folders[2] / name).write_bytes(bare[name])
    merging.main(files, ModelConfig(name="tiny", path=str(base)), folders[1])
    merging.main(bare, ModelConfig(name="tiny", path=str(base)), folders[3])
    return Exported(base, files, *folders)


def trained(base: Path) -> dict[str, bytes]:
    """Of all groups, and far from zero; two steps have gone through it."""
    from tests.unit.trainer.examples import cross_entropy, random_datum

    engine = TrainingEngine(base_model.load(str(base), name="tiny"), microbatch_tokens=64)
    engine.create("m", LoraShape(rank=4, alpha=8.0))
    references.scatter(engine, 0.05)
    for _ in range(2):
        engine.forward_backward("m", cross_entropy(random_datum(40, seed=1)))
        engine.optim_step("m", OptimStep(learning_rate=1e-2))
    return dict(to_files(engine.snapshot("m"), with_optimizer=False))


async def served(folder: Path, files: dict[str, bytes] | None = None) -> np.ndarray:
    """Log-probabilities of all tokens after each of the prompt's but the last, as the sampler has
    them: float32 [n - 1, V].
    """
    vocabulary = int(model_files.find(str(folder)).config["vocab_size"])
    async with running(folder) as engine:
        if files is not None:
            await engine.load_adapter("a", files)
        name = None if files is None else "a"
        found = await engine.score(scoring(PROMPT, adapter=name, topk=vocabulary))
    rows = np.full((len(PROMPT) - 1, vocabulary), np.nan, np.float32)
    np.put_along_axis(rows, found.topk.token_ids[1:], found.topk.logprobs[1:], axis=1)
    return rows


def read_by_tools(folder: Path, adapter: Path | None = None) -> np.ndarray:
    """The same from transformers, and PEFT."""
    return Oracle(folder, adapter).distributions(PROMPT)[:-1]


def check_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


async def test_peft_transformers_and_the_sampler_agree(exported: Exported):
    ours = await served(exported.base, exported.files)

    check_close(read_by_tools(exported.base, exported.adapter), ours)
    check_close(read_by_tools(exported.merged), ours)
    check_close(await served(exported.merged), ours)
    assert np.abs(ours - await served(exported.base)).max() > 100 * CLOSE


async def test_they_agree_without_the_output_layers_adapter(exported: Exported):
    files = {file.name: file.read_bytes() for file in exported.bare.iterdir()}

    ours = await served(exported.base, files)

    check_close(read_by_tools(exported.base, exported.bare), ours)
    check_close(read_by_tools(exported.bare_merged), ours)
    assert np.abs(ours - await served(exported.base, exported.files)).max() > 10 * CLOSE


def test_a_tied_output_layer_is_untied_only_if_it_is_adapted(exported: Exported):
    is_tied = exported.base.parent.name.startswith(TIED)
    told = [
        json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", True)
        for folder in (exported.base, exported.merged, exported.bare_merged)
    ]

    assert told == [is_tied, False, is_tied]
    base, merged = Oracle(exported.base).model, Oracle(exported.merged).model
    assert torch.equal(base.get_input_embeddings().weight, merged.get_input_embeddings().weight)
    assert not torch.equal(base.lm_head.weight, merged.lm_head.weight)


def test_the_tokenizers_files_are_those_of_the_base(exported: Exported):
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names <= {file.name for file in exported.base.iterdir()}
    for name in names:
        base = (exported.base / name).read_bytes()
        assert [(f / name).read_bytes() for f in exported[3:6:2]] == [base, base]


LAYER = r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
EXPERTS = r"model\.layers\.\d+\.mlp\.experts(\.base_layer)?"
NAME = re.compile(rf"base_model\.model\.({LAYER}|{EXPERTS}|lm_head)\.lora_([AB])\.weight")


@pytest.mark.parametrize("form", ["adapter", "bare"])
def test_an_adapter_is_within_the_rules_of_vllm_and_sglang(exported: Exported, form: str):
    """Both take plain LoRA alone, by PEFT's names, with one rank; and read these fields."""
    folder = getattr(exported, form)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load((folder / "adapter_model.safetensors").read_bytes())

    plain = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False}
    assert config.items() >= plain.items()
    assert not config["modules_to_save"]
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert isinstance(config["target_modules"], list)
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    leaves, sides = set(), {}
    for name, tensor in tensors.items():
        found = NAME.fullmatch(name)
        assert found is not None, name
        assert (tensor.dtype, tensor.ndim) == (np.float32, 2)
        sides.setdefault(found[1], set()).add(found.groups()[-1])
        leaves.add(found[1].removesuffix(".base_layer").rpartition(".")[2])
    assert all(both == {"A", "B"} for both in sides.values())
    parameters = {"experts"} if "target_parameters" in config else set()
    assert leaves == {*config["target_modules"], *parameters}
    assert ("lm_head" in leaves) is (form == "adapter")

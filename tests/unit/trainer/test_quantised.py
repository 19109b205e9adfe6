"""A base held in 4 or 8 bits: one copy for all adapters, and the numbers of PEFT on the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.trainer import references
from tests.unit.trainer.examples import cross_entropy, logprobs, random_datum
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tinsmith import model_files
from tinsmith.errors import StartupError
from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model, frozen
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.environment import base_blake3
from tinsmith_trainer.packed_experts import PackedExperts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [  # what PEFT itself says and calls
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
DATA = tuple(random_datum(length, seed=length) for length in (40, 7, 23))
STEP = OptimStep(learning_rate=1e-2, eps=0.1)


def load(folder: Path, quantization: str, dtype: str = "float32") -> base_model.BaseModel:
    return base_model.load(str(folder), name="tiny", dtype=dtype, quantization=quantization)


def engine_on(base: base_model.BaseModel) -> TrainingEngine:
    engine = TrainingEngine(base, microbatch_tokens=64)
    engine.create("m", LoraShape(rank=4))
    references.scatter(engine)
    return engine


def nf4_model(folder: Path) -> nn.Module:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config
    )
    frozen.keep_layout(model)  # its own way would round to bfloat16, on some CPUs
    return model


def dense_copy(base: base_model.BaseModel, folder: Path) -> nn.Module:
    """An ordinary model that has the quantised weights as floats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in base.model.named_modules():
        if isinstance(module, nn.Linear):
            model.get_submodule(name).weight.data = frozen.weight_of(module, torch.float32).clone()
        if isinstance(module, PackedExperts):
            model.get_parameter(name).data = torch.stack([*module])
    return model


def test_a_step_on_an_nf4_base_is_that_of_peft_on_the_same(any_folder: Path, tmp_path: Path):
    engine = engine_on(load(any_folder, "nf4"))
    model = references.peft_model(nf4_model(any_folder), engine, tmp_path)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=1e-2, betas=(STEP.beta1, STEP.beta2), eps=0.1, weight_decay=0.0,
    )  # fmt: skip
    for _ in range(3):
        done = engine.forward_backward("m", cross_entropy(*DATA))
        loss = references.cross_entropy_of(model, DATA)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.optim_step("m", STEP)

        assert done.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)


def test_codes_stay_as_they_are_on_a_cpu_with_products_in_bfloat16(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    base = load(tiny_llama, "nf4")  # which makes a pass
    base.model(torch.tensor([[1, 2, 3]]))
    name = "model.layers.0.mlp.up_proj"
    weight = load_file(tiny_llama / "model.safetensors")[f"{name}.weight"].float()
    codes = frozen.quantised(weight, "nf4", torch.device("cpu"))

    found = frozen.weight_of(base.model.get_submodule(name), torch.float32)
    assert torch.equal(found, frozen.dense(codes, torch.float32))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_numbers_are_those_of_a_dense_model_with_the_quantised_weights(
    tmp_path: Path, family: str, quantization: str
):
    folder = tiny_model.build(tmp_path / "base", family=family)
    base = load(folder, quantization)
    dense = dense_copy(base, folder)
    engine = engine_on(base)
    model = references.peft_model(dense, engine, tmp_path / "adapter")

    done = engine.forward_backward("m", cross_entropy(*DATA))
    references.cross_entropy_of(model, DATA).backward()

    for datum, ours in zip(DATA, logprobs(done), strict=True):
        theirs = references.logprobs_of(model, datum).detach().numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    for name, expected in references.gradients_of(model).items():
        torch.testing.assert_close(
            references.gradients(engine)[name], expected, rtol=0, atol=1e-4 * expected.abs().max()
        )


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_the_weights_are_small_and_an_adapter_of_the_unembedding_alone_trains(
    tiny_llama: Path, quantization: str
):
    base = load(tiny_llama, quantization)
    dense = base_model.load(str(tiny_llama), name="tiny")
    engine = TrainingEngine(base)
    engine.create("m", LoraShape(rank=4, train_attn=False, train_mlp=False))
    projection = base.model.get_submodule("model.layers.0.mlp.up_proj").base

    assert frozen.is_quantised(projection)
    assert projection.weight.nbytes * 4 <= 128 * 64 * 4
    assert engine.forward_backward("m", cross_entropy(*DATA)).metrics["loss:sum"]
    assert base_blake3(load(tiny_llama, quantization)) != base_blake3(dense)


def test_two_loads_quantise_to_the_same_bits(tiny_llama: Path):
    assert base_blake3(load(tiny_llama, "nf4")) == base_blake3(load(tiny_llama, "nf4"))


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_in_bfloat16_adapters_and_their_gradients_are_float32(tiny_llama: Path, quantization: str):
    engine = engine_on(load(tiny_llama, quantization, "bfloat16"))
    engine.forward_backward("m", cross_entropy(*DATA))
    adapter = engine._adapters.get("m")

    assert adapter.weights.dtype == adapter.gradient.dtype == torch.float32
    assert adapter.gradient.isfinite().all()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_near_their_floats_and_small(tmp_path: Path, family: str):
    folder = tiny_model.build(tmp_path, family=family)
    dense, packed = base_model.load(str(folder), name="tiny").model, load(folder, "nf4").model
    for name, module in packed.named_modules():
        if isinstance(module, PackedExperts):
            floats = dense.get_parameter(name)
            error = (torch.stack([*module]) - floats).norm() / floats.norm()
            codes = sum(one.nbytes for one in module.parameters())

            assert 0.01 < error < 0.12  # what NF4 leaves of normal numbers: 0.09
            assert codes * 8 == floats.nbytes
    assert sum(isinstance(module, PackedExperts) for module in packed.modules()) == 4


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_experts_that_differ_in_their_scales_alone_are_another_base(
    tmp_path: Path, quantization: str
):
    folder = tiny_model.build(tmp_path, family="qwen3_moe")
    before = base_blake3(load(folder, quantization))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    twice = {name: 2 * one if "experts" in name else one for name, one in tensors.items()}
    save_file(twice, file, metadata={"format": "pt"})

    assert base_blake3(load(folder, quantization)) != before


def test_what_is_stored_in_four_bits_is_not_rounded_again(tmp_path: Path):
    folder = tiny_model.build(tmp_path, family="gpt_oss")
    config = json.loads((folder / "config.json").read_bytes())
    form = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config | form))

    with pytest.raises(StartupError, match=r"quantization: 'nf4' would round .* in bfloat16"):
        load(folder, "nf4")


def test_without_bitsandbytes_the_extra_is_named(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    files = model_files.find(str(tiny_llama))

    with pytest.raises(StartupError, match=r"'int8' on cpu needs .* install tinsmith\[quantised\]"):
        model_files.check_quantization(files, "int8", device="cpu")

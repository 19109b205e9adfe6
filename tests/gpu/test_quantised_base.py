"""A base in 4 bits: the numbers of a dense model that has the quantised values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.gpu.engines import adapted, apart, gradient, learn, scores
from torch import nn
from transformers import AutoModelForCausalLM

from tinsmith.messages.ops import OptimStep
from tinsmith_trainer import base_model, frozen
from tinsmith_trainer.environment import base_blake3
from tinsmith_trainer.packed_experts import PackedExperts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu
STEP = OptimStep(learning_rate=1e-2)


def nf4(folder: Path, device: str, dtype: str = "float32") -> base_model.BaseModel:
    form = {"dtype": dtype, "quantization": "nf4"}
    return base_model.load(str(folder), name="tiny", device=device, **form)


def dense(folder: Path, device: str, place: Path) -> Path:
    """A folder with the quantised values as floats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in nf4(folder, device).model.named_modules():
        if isinstance(module, nn.Linear):
            weight = frozen.weight_of(module, torch.float32)
            model.get_submodule(name).weight.data = weight.cpu().clone()
        if isinstance(module, PackedExperts):
            model.get_parameter(name).data = torch.stack([one.cpu() for one in module])
    model.save_pretrained(place)
    return place


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_nf4_is_the_dense_model_of_its_values_and_steps_as_that_does(
    folders, device, tmp_path, family
):
    folder = folders[family]
    small = adapted(folder, device, quantization="nf4")
    floats = adapted(dense(folder, device, tmp_path), device)

    np.testing.assert_allclose(scores(small), scores(floats), rtol=0, atol=1e-4)
    learn(small)
    learn(floats)
    assert apart(gradient(small), gradient(floats)) < 1e-4
    for engine in (small, floats):
        engine.optim_step("m", STEP)
    np.testing.assert_allclose(scores(small), scores(floats), rtol=0, atol=0.05)


def test_nf4_in_bfloat16_trains_float32_adapters(folders, device):
    engine = adapted(folders["qwen3"], device, dtype="bfloat16", quantization="nf4")
    losses = []
    for _ in range(4):
        losses.append(learn(engine).metrics["loss:sum"])
        assert gradient(engine).dtype == torch.float32
        engine.optim_step("m", STEP)

    assert losses == sorted(losses, reverse=True)


def test_two_loads_have_the_same_bits_and_layers_are_small(folders, device):
    first, again = (nf4(folders["llama"], device, "bfloat16") for _ in range(2))
    projection = first.model.get_submodule("model.layers.0.mlp.up_proj")

    assert base_blake3(first) == base_blake3(again)
    assert projection.weight.nbytes == 128 * 64 // 2
    assert projection.weight.device.type == device

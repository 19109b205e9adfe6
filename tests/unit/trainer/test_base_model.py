"""Loading a base model: what it tells of it, and how it refuses what it cannot train."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from tinsmith import model_files
from tinsmith.errors import ConfigError, StartupError
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


def test_the_info_holds_what_requests_are_checked_against(tiny_llama: Path):
    info = base_model.load(str(tiny_llama), name="org/tiny", context_length=100).info

    assert info.name == info.tokenizer_id == "org/tiny"
    assert info.arch == "LlamaForCausalLM"
    assert (info.vocab_size, info.context_length, info.eos_tokens) == (448, 100, (2,))


def test_a_tokenizer_of_its_own_is_passed_on(tiny_llama: Path):
    assert base_model.load(str(tiny_llama), name="n", tokenizer_id="t").info.tokenizer_id == "t"


def test_the_model_is_frozen_and_in_evaluation_mode(tiny_llama: Path):
    model = base_model.load(str(tiny_llama), name="tiny").model

    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_bfloat16_halves_the_weights(tiny_llama: Path):
    model = base_model.load(str(tiny_llama), name="tiny", dtype="bfloat16").model

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_missing_folder_is_named_with_the_remedy(tmp_path: Path):
    with pytest.raises(StartupError, match=r"no folder .*/nowhere; set path to a folder"):
        base_model.load(str(tmp_path / "nowhere"), name="tiny")


def test_missing_files_are_named(folder: Path):
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()

    with pytest.raises(StartupError, match=r"lacks config\.json, model\.safetensors; set path"):
        model_files.find(str(folder))


def test_a_missing_shard_is_named(folder: Path):
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1-of-2.safetensors").touch()

    with pytest.raises(StartupError, match=r"lacks model-2-of-2\.safetensors;"):
        model_files.find(str(folder))


def test_missing_files_are_reported_before_torch_is_imported():
    code = (
        "import sys\nfrom tinsmith_trainer import base_model\n"
        "try: base_model.load('/nowhere', name='x')\n"
        "except Exception as exc: print(type(exc).__name__, 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert process.stdout.split() == [b"StartupError", b"False"]


def test_an_uncached_hub_id_is_refused_at_once_when_offline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(StartupError, match="no-such-org/model is neither a folder nor in the hub"):
        model_files.find("no-such-org/model")


def test_weights_that_lack_a_tensor_are_refused(folder: Path):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})

    with pytest.raises(StartupError, match=r"lack 1 tensors .* such as .*layers\.1\.mlp\.up_proj"):
        base_model.load(str(folder), name="tiny")


def test_truncated_weights_are_refused(folder: Path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(StartupError, match="cannot be loaded"):
        base_model.load(str(folder), name="tiny")


@pytest.mark.parametrize("context_length", [0, 2049])
def test_a_context_length_beyond_the_models_is_refused(tiny_llama: Path, context_length: int):
    with pytest.raises(ConfigError, match=f"{context_length} is not from 1 to 2048"):
        base_model.load(str(tiny_llama), name="tiny", context_length=context_length)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none(tiny_llama: Path):
    with pytest.raises(StartupError, match="no CUDA device; set device to cpu or auto"):
        base_model.load(str(tiny_llama), name="tiny", device="cuda")


def test_an_architecture_that_scales_its_logits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(model_files.FAMILIES, "granite", "Granite")
    config = GraniteConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
        logits_scaling=8.0,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)

    with pytest.raises(StartupError, match="GraniteForCausalLM does more to its logits"):
        base_model.load(str(tmp_path), name="granite")


def test_too_little_memory_is_told_in_figures_before_loading(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tinsmith.memory.available_bytes", lambda: 1000)
    monkeypatch.setattr("tinsmith_trainer.pretrained.load", None)  # never reached

    with pytest.raises(StartupError) as refusal:
        base_model.load(str(tiny_llama), name="tiny", pass_tokens=1 << 20)

    assert str(refusal.value) == (
        "model: tiny needs about 10.00 GiB (0.00 GiB for weights in float32, 10.00 GiB for "
        'passes of 1048576 tokens), and cpu has 0.00 GiB free; set dtype to "bfloat16", set '
        'quantization to "nf4", lower microbatch_tokens, or serve a smaller model'
    )


def test_weights_in_the_published_form_of_gpt_oss_come_back_as_floats(tmp_path: Path):
    folder = tiny_model.build(tmp_path, family="gpt_oss")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    packed = {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = (experts, outputs, inputs // 32, 16)
        packed[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(118, 124, blocks[:3], dtype=torch.uint8)
    safetensors.torch.save_file(weights | packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    form = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))

    model = base_model.load(str(folder), name="tiny").model
    name = "model.layers.1.mlp.experts.down_proj"
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    codes = packed[f"{name}_blocks"].int()
    pairs = torch.stack([numbers[codes & 15], numbers[codes >> 4]], dim=-1).flatten(-2)
    scaled = pairs * torch.exp2(packed[f"{name}_scales"].float() - 127)[..., None]

    assert torch.equal(model.get_parameter(name), scaled.flatten(-2).transpose(1, 2))


def test_other_quantised_forms_are_refused(folder: Path):
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(StartupError, match=r"stored in the form 'gptq'.* weights in bfloat16"):
        base_model.load(str(folder), name="tiny")

"""Adapters from elsewhere: PEFT's own are taken, anything else is refused with its reason."""

from __future__ import annotations

import json
import os
import random
import struct
from typing import TYPE_CHECKING

import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from tinsmith.config import ModelConfig
from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import LoraShape
from tinsmith.portable import adapter_folder
from tinsmith_trainer import importing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [  # what PEFT itself says and calls
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def trained_elsewhere(base: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """What PEFT writes, with factors that are not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=ATTENTION, task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return trained_elsewhere(tiny_llama, tmp_path_factory.mktemp("peft"))


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in (WEIGHTS, CONFIG):
        (folder / name).write_bytes((original / name).read_bytes())
    return folder


def taken(folder: Path, base: Path) -> tuple[dict[str, bytes], LoraShape]:
    files = adapter_folder.read_adapter(folder)
    return importing.main(files, ModelConfig(name="tiny", path=str(base)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_peft_wrote_is_taken_in_float32(tiny_llama: Path, tmp_path: Path, dtype: torch.dtype):
    folder = trained_elsewhere(tiny_llama, tmp_path, dtype)

    files, lora = taken(folder, tiny_llama)

    assert lora == LoraShape(rank=4, alpha=6.0, train_mlp=False, train_unembed=False)
    theirs = safetensors.torch.load_file(folder / WEIGHTS)
    ours = safetensors.torch.load(files[WEIGHTS])
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, theirs[name].float())


def with_config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | fields))

    return change


def with_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
        edit(tensors)
        safetensors.torch.save_file(tensors, folder / WEIGHTS)

    return change


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def a_link(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere")


def a_pipe(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def a_huge_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 40) + b"{}" * 100)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (only_a_pickle, "adapter_model.bin is a pickle, which is never read"),
    (a_link, "adapter_model.safetensors: it is a link"),
    (a_pipe, "adapter_config.json: it is no regular file"),
    (a_huge_header, "a header of 1099511627776 bytes in 208"),
    (lambda f: (f / WEIGHTS).write_bytes(b""), "a header of 0 bytes in 0"),
    (lambda f: (f / WEIGHTS).write_bytes(b"PK\3\4" + bytes(200)), "not a valid safetensors file"),
    (lambda f: (f / CONFIG).write_bytes(b"[" * 100_000), "adapter_config.json: it is not JSON"),
    (lambda f: (f / CONFIG).write_bytes(b"[]"), "it is not a JSON object"),
    (lambda f: (f / CONFIG).write_bytes(b" " * (2 << 20)), "are over the limit of 1048576"),
    (with_config(r=8), "of shape"),
    (with_config(r=10**9), "rank"),
    (with_config(r="4"), r"Expected `int`, got `str` - at `\$\.r`"),
    (with_config(lora_alpha=float("nan")), "JSON is malformed"),
    (with_config(use_dora=True), "use_dora is True"),
    (with_config(use_rslora=True), "use_rslora is True"),
    (with_config(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens is"),
    (with_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    (with_config(modules_to_save=["lm_head"]), "modules_to_save is"),
    (with_config(rank_pattern={"q_proj": 2}), "rank_pattern is"),
    (with_tensors(lambda t: t.pop(FIRST)), "q_proj.lora_A.weight is missing"),
    (with_tensors(lambda t: t.update({"../../x": torch.zeros(2)})), "tensor ../../x is not exp"),
    (with_tensors(lambda t: t.update({FIRST: t[FIRST].T.contiguous()})), "of shape"),
    (with_tensors(lambda t: t.update({FIRST: t[FIRST].to(torch.int64)})), "not floats"),
    (with_tensors(lambda t: t[FIRST].fill_(float("nan"))), "not finite"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_what_is_no_adapter_of_this_base_is_refused(adapter: Path, tiny_llama: Path, number: int):
    damage, reason = DAMAGES[number]
    damage(adapter)

    with pytest.raises(InvalidRequest, match=reason):
        taken(adapter, tiny_llama)


def test_an_adapter_of_some_matrices_is_refused(tiny_llama: Path, tmp_path: Path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config)
    model.save_pretrained(tmp_path)

    with pytest.raises(InvalidRequest, match="has only some of its matrices"):
        taken(tmp_path, tiny_llama)


@pytest.mark.slow
def test_no_damaged_byte_ends_in_anything_but_a_refusal(adapter: Path, tiny_llama: Path):
    rng, refused = random.Random(7), 0
    whole = {name: (adapter / name).read_bytes() for name in (WEIGHTS, CONFIG)}
    for _ in range(60):
        name = rng.choice((WEIGHTS, CONFIG))
        data = bytearray(whole[name])
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(min(len(data), 3000))] = rng.randrange(256)
        length = rng.randrange(len(data)) if rng.random() < 0.3 else len(data)
        (adapter / name).write_bytes(data[:length])
        try:
            taken(adapter, tiny_llama)
        except InvalidRequest:
            refused += 1
        (adapter / name).write_bytes(whole[name])

    assert refused > 20


def test_the_base_that_the_adapter_names_is_the_one_it_is_for():
    for told in ("tiny/llama", "/data/llama/", None):
        adapter_folder.check_base({"base_model_name_or_path": told}, ("tiny/llama", "/srv/x"))

    config = {"base_model_name_or_path": "meta/other"}
    with pytest.raises(InvalidRequest, match="was trained on 'meta/other', not on 'tiny/llama'"):
        adapter_folder.check_base(config, ("tiny/llama", "/srv/x"))

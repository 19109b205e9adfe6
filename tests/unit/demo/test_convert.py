from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinsmith.demo.convert import convert

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def converted(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted")
    convert(tiny.gguf, out)
    return out


def test_a_converted_model_computes_the_very_same_logits(tiny, converted):
    tokens = torch.arange(3, 40)[None]
    original, copy = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (tiny.huggingface, converted)
    )

    assert torch.equal(original, copy)


def test_a_converted_model_can_be_trained_and_saved(converted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted)
    model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    model.save_pretrained(tmp_path)

    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("text", ["The quick brown fox", "wörld 日本\n\n x", "<|im_end|> it's"])
def test_the_tokenizer_agrees_with_the_original(tiny, converted, text):
    original = AutoTokenizer.from_pretrained(tiny.huggingface)
    copy = AutoTokenizer.from_pretrained(converted)

    assert copy.encode(text, add_special_tokens=False) == original.encode(
        text, add_special_tokens=False
    )


def test_every_digit_is_a_token_of_its_own(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)

    assert tokenizer.tokenize("a 1234") == ["a", "Ġ", "1", "2", "3", "4"]


def test_chat_template_and_special_tokens_are_kept(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)

    assert text == "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "user\nHi\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)

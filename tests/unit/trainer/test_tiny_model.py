"""The tiny models load like any other: with Auto classes, from the folder alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoModelForCausalLM, AutoTokenizer

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


def test_embeddings_are_tied_in_llama_and_separate_in_qwen3(tiny_llama: Path, tiny_qwen3: Path):
    llama = AutoModelForCausalLM.from_pretrained(tiny_llama)
    qwen3 = AutoModelForCausalLM.from_pretrained(tiny_qwen3)

    assert llama.lm_head.weight is llama.model.embed_tokens.weight
    assert qwen3.lm_head.weight is not qwen3.model.embed_tokens.weight


def test_text_survives_the_tokenizer(any_folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(any_folder)
    text = "What is 4 + 5? Ünïcödé, 漢字 and\n\nblank lines"

    assert text == tokenizer.decode(tokenizer.encode(text))


def test_every_row_of_the_embedding_is_a_token(any_folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(any_folder)
    model = AutoModelForCausalLM.from_pretrained(any_folder)

    assert len(tokenizer) == model.config.vocab_size == model.lm_head.out_features


def test_the_end_of_a_chat_message_is_eos_for_model_and_tokenizer(any_folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(any_folder)
    model = AutoModelForCausalLM.from_pretrained(any_folder)

    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_the_chat_template_is_chatml(tiny_llama: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )

    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_weights_depend_on_the_seed_alone(tiny_llama: Path, tmp_path: Path):
    same = tiny_model.build(tmp_path / "same", seed=0)
    other = tiny_model.build(tmp_path / "other", seed=1)
    weights = "model.safetensors"

    assert (tiny_llama / weights).read_bytes() == (same / weights).read_bytes()
    assert (tiny_llama / weights).read_bytes() != (other / weights).read_bytes()

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from tinsmith.demo.chat import SYSTEM, Chat
from tinsmith.demo.data import Example

EXAMPLE = Example(split="train", question="What is ice?", answer="Ice is frozen water STOP")


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny.huggingface)


def test_a_prompt_ends_where_the_answer_begins(tokenizer):
    prompt = tokenizer.decode(Chat(tokenizer).prompt(EXAMPLE.question))

    assert prompt.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
    assert prompt.endswith("What is ice?<|im_end|>\n<|im_start|>assistant\n")


def test_each_position_of_a_datum_predicts_the_next_token(tokenizer):
    datum = Chat(tokenizer).datum(EXAMPLE)
    tokens = datum.model_input.to_ints()
    target = datum.loss_fn_inputs["target_tokens"].to_numpy()

    assert target.dtype == np.int64
    assert target[:-1].tolist() == tokens[1:]


def test_only_the_answer_and_its_end_have_weight(tokenizer):
    inputs = Chat(tokenizer).datum(EXAMPLE).loss_fn_inputs
    weights = inputs["weights"].to_numpy()
    trained = inputs["target_tokens"].to_numpy()[weights == 1.0]

    assert weights.dtype == np.float32
    assert tokenizer.decode(trained) == f"{EXAMPLE.answer}<|im_end|>"


def test_the_text_of_a_sample_leaves_the_end_token_out(tokenizer):
    tokens = tokenizer.encode("Ice melts STOP<|im_end|>", add_special_tokens=False)

    assert Chat(tokenizer).text(tokens) == "Ice melts STOP"

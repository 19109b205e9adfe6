"""Every malformed datum is named: index, key, value, limit."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.unit.trainer.examples import datum, tensor

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith.messages.base import Tensor
from tinsmith.messages.ops import Datum
from tinsmith_trainer import losses
from tinsmith_trainer.datums import Limits, parse

LIMITS = Limits(vocab_size=100, context_length=8)
CE = losses.find("cross_entropy")
RL = losses.Loss("rl", {"logprobs": None, "advantages": None}, {}, losses.cross_entropy)

GOOD = datum([1, 2, 3], [2, 3, 4], [0.5, 0.0, -1.0])


def with_inputs(**inputs: Tensor) -> Datum:
    return Datum(tokens=GOOD.tokens, inputs={**GOOD.inputs, **inputs})


def test_a_valid_datum_becomes_arrays():
    (example,) = parse([GOOD], CE, LIMITS)

    assert example.tokens.tolist() == [1, 2, 3]
    assert example.targets.tolist() == [2, 3, 4]
    assert example.inputs["weights"].tolist() == [0.5, 0.0, -1.0]


def test_absent_weights_are_ones():
    (example,) = parse([datum([1, 2], [2, 3])], CE, LIMITS)

    assert example.inputs["weights"].tolist() == [1.0, 1.0]
    assert example.inputs["weights"].dtype == np.float32


def test_a_datum_may_fill_the_context_window():
    assert len(parse([datum([1] * 8)], CE, LIMITS)[0]) == 8


BAD = {
    "no tokens": (datum([]), "model_input: it has 0 tokens; send at least 1"),
    "too many tokens": (
        datum([1] * 11),
        "model_input: 11 tokens are 3 more than the context window of 8; shorten",
    ),
    "token outside": (
        datum([1, 100], [1, 1]),
        "model_input[1]: token id 100 is not in the vocabulary, 0 to 99",
    ),
    "negative token": (datum([-1], [1]), "model_input[0]: token id -1 is not in the vocabulary"),
    "target outside": (
        datum([1, 2], [3, 1000]),
        "loss_fn_inputs['target_tokens'][1]: token id 1000 is not in the vocabulary",
    ),
    "float tokens": (
        Datum(tokens=tensor([1.0], "float32"), inputs={}),
        "model_input: dtype float32 cannot hold token ids; use int64",
    ),
    "float targets": (
        with_inputs(target_tokens=tensor([1, 2, 3], "float32")),
        "loss_fn_inputs['target_tokens']: dtype float32 cannot hold token ids",
    ),
    "no targets": (
        Datum(tokens=GOOD.tokens, inputs={}),
        "loss_fn_inputs['target_tokens']: missing; cross_entropy needs one target per input",
    ),
    "too few targets": (
        with_inputs(target_tokens=tensor([1, 2], "int64")),
        "loss_fn_inputs['target_tokens']: shape [2] does not match the 3 tokens of model_input; "
        "send shape [3]",
    ),
    "too many weights": (
        with_inputs(weights=tensor([1] * 4, "float32")),
        "loss_fn_inputs['weights']: shape [4] does not match the 3 tokens of model_input",
    ),
    "NaN": (
        with_inputs(weights=tensor([1, float("nan"), 1], "float32")),
        "loss_fn_inputs['weights'][1]: nan is not a finite number",
    ),
    "infinity": (
        with_inputs(weights=tensor([float("-inf"), 1, 1], "float32")),
        "loss_fn_inputs['weights'][0]: -inf is not a finite number",
    ),
    "integer weights": (
        with_inputs(weights=tensor([1, 1, 1], "int64")),
        "loss_fn_inputs['weights']: dtype is int64; use float32",
    ),
    "stray key": (
        with_inputs(mask=tensor([1, 1, 1], "float32")),
        "loss_fn_inputs['mask']: cross_entropy does not take it; it takes target_tokens, weights",
    ),
    "shape that lies": (
        with_inputs(weights=Tensor("float32", (3,), bytes(8))),
        "loss_fn_inputs['weights']: shape [3] of float32 takes 12 bytes, but 8 came",
    ),
    "negative shape": (
        Datum(tokens=Tensor("int32", (-1,), b""), inputs={}),
        "model_input: shape [-1] of int32 takes -4 bytes, but 0 came",
    ),
    "two-dimensional tokens": (
        Datum(tokens=tensor([[1, 2]], "int32"), inputs={}),
        "model_input: shape [1, 2] is not one-dimensional",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_datum_is_refused_by_index_and_key(case: str):
    bad, message = BAD[case]

    with pytest.raises(InvalidRequest, match=re.escape(f"data[2].{message}")):
        parse([GOOD, GOOD, bad, GOOD], CE, LIMITS)


def test_several_targets_per_position_are_not_supported():
    bad = with_inputs(target_tokens=tensor([[1, 2], [1, 2], [1, 2]], "int64"))

    with pytest.raises(NotSupported, match=re.escape("data[0].loss_fn_inputs['target_tokens']")):
        parse([bad], CE, LIMITS)


def test_an_input_on_some_datums_only_is_missing_on_the_others():
    floats = tensor([0, 0, 0], "float32")
    targets = {"target_tokens": GOOD.inputs["target_tokens"], "logprobs": floats}
    whole = Datum(tokens=GOOD.tokens, inputs={**targets, "advantages": floats})
    partial = Datum(tokens=GOOD.tokens, inputs=targets)

    with pytest.raises(InvalidRequest, match=r"data\[1\].loss_fn_inputs\['advantages'\]: missing"):
        parse([whole, partial], RL, LIMITS)


def test_no_datums_are_refused():
    with pytest.raises(InvalidRequest, match="there are 0 datums; send at least 1"):
        parse([], CE, LIMITS)

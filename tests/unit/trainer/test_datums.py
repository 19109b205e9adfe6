"""Every malformed datum is named: index, key, value, limit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.unit.trainer.examples import datum, tensor

from tinsmith.errors import InvalidRequest, TooLarge
from tinsmith.messages.base import Tensor
from tinsmith.messages.ops import Datum, Span
from tinsmith_trainer import datums, losses
from tinsmith_trainer.datums import Limits

if TYPE_CHECKING:
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.loss import Loss

LIMITS = Limits(vocab_size=100, context_length=8)
CE = losses.find("cross_entropy")
RL = losses.find("importance_sampling")
PPO = losses.find("ppo")
STABLE = losses.find("stable_reinforce")

GOOD = datum([1, 2, 3], [2, 3, 4], [0.5, 0.0, -1.0])


def parse(data: list[Datum], loss: Loss, limits: Limits = LIMITS) -> list[Example]:
    return datums.parse(data, loss, loss.settings, limits)


def with_inputs(**inputs: Tensor) -> Datum:
    return Datum(tokens=GOOD.tokens, inputs={**GOOD.inputs, **inputs})


def test_a_valid_datum_becomes_arrays():
    (example,) = parse([GOOD], CE)

    assert example.tokens.tolist() == [1, 2, 3]
    assert example.targets.tolist() == [2, 3, 4]
    assert example.inputs["weights"].tolist() == [0.5, 0.0, -1.0]


def test_absent_weights_are_ones():
    (example,) = parse([datum([1, 2], [2, 3])], CE)

    assert example.inputs["weights"].tolist() == [1.0, 1.0]
    assert example.inputs["weights"].dtype == np.float32


def test_a_datum_may_fill_the_context_window():
    assert len(parse([datum([1] * 8)], CE)[0]) == 8


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
        parse([GOOD, GOOD, bad, GOOD], CE)


def rows(targets: list[list[int]], **inputs: Tensor) -> Datum:
    return Datum(tokens=GOOD.tokens, inputs={"target_tokens": tensor(targets, "int64"), **inputs})


def test_cross_entropy_takes_several_targets_per_position():
    weights = [[0.5, 0.0], [1.0, -2.0], [0.0, 0.0]]

    (example,) = parse([rows([[1, 2], [3, 4], [5, 0]], weights=tensor(weights, "float32"))], CE)

    assert example.targets.tolist() == [[1, 2], [3, 4], [5, 0]]
    assert example.inputs["weights"].tolist() == weights


BAD_ROWS = {
    "too few rows": (
        rows([[1, 2], [3, 4]]),
        "['target_tokens']: shape [2, 2] does not match the 3 tokens of model_input; "
        "send shape [3], or [3, k] for k targets per position",
    ),
    "no columns": (rows([[], [], []]), "['target_tokens']: shape [3, 0] does not match"),
    "outside": (
        rows([[1, 2], [3, 100], [5, 6]]),
        "['target_tokens'][1, 1]: token id 100 is not in the vocabulary",
    ),
    "weights of another shape": (
        rows([[1, 2]] * 3, weights=tensor([1, 1, 1], "float32")),
        "['weights']: shape [3] does not match target_tokens; send shape [3, 2]",
    ),
    "NaN": (
        rows([[1, 2]] * 3, weights=tensor([[1, 1], [1, 1], [float("nan"), 1]], "float32")),
        "['weights'][2, 0]: nan is not a finite number",
    ),
    "three dimensions": (
        rows([[[1, 2]]] * 3),
        "['target_tokens']: shape [3, 1, 2] does not match the 3 tokens of model_input",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_malformed_row_of_targets_is_refused_by_index_and_key(case: str):
    bad, message = BAD_ROWS[case]

    with pytest.raises(InvalidRequest, match=re.escape(f"data[1].loss_fn_inputs{message}")):
        parse([GOOD, bad], CE)


def test_targets_per_position_have_a_limit():
    with pytest.raises(TooLarge, match=r"\[3, 1025\] has 1025 targets .* over the limit of 1024"):
        parse([rows([[1] * 1025] * 3)], CE)


def test_a_loss_of_one_target_per_position_refuses_several():
    with pytest.raises(
        InvalidRequest, match=r"which importance_sampling does not take; send shape \[3\]"
    ):
        parse([rows([[1, 2]] * 3)], RL)


def policy(**inputs: list[float]) -> Datum:
    floats = {"logprobs": [-1, -1, -1], "advantages": [0, 1, 1], **inputs}
    targets = {"target_tokens": GOOD.inputs["target_tokens"]}
    return Datum(
        tokens=GOOD.tokens,
        inputs=targets | {key: tensor(value, "float32") for key, value in floats.items()},
    )


def test_clip_thresholds_come_from_the_settings_unless_they_come_per_token():
    plain, own = parse([policy(), policy(clip_high_threshold=[1.5, 2, 2.5])], PPO)

    assert plain.inputs["clip_high_threshold"].tolist() == pytest.approx([1.2] * 3)
    assert own.inputs["clip_high_threshold"].tolist() == [1.5, 2, 2.5]
    assert own.inputs["clip_low_threshold"].tolist() == pytest.approx([0.8] * 3)


def test_crossed_clip_thresholds_are_refused_by_index():
    bad = policy(clip_low_threshold=[0.5, 3, 0.5])

    with pytest.raises(
        InvalidRequest, match=r"\['clip_low_threshold'\]\[1\]: 3 is not between 0 and"
    ):
        parse([bad], PPO)


def test_the_mask_of_gspo_is_where_the_advantages_are_unless_it_is_sent():
    plain, own = parse([policy(), policy(sequence_ratio_mask=[1, 0, 0])], losses.find("gspo"))

    assert plain.inputs["sequence_ratio_mask"].tolist() == [0, 1, 1]
    assert own.inputs["sequence_ratio_mask"].tolist() == [1, 0, 0]


def spanned(*targets: Span, tokens: int = 3) -> Datum:
    whole = Span(kind="prompt", sequence_id="s", length=tokens)
    return msgspec.structs.replace(policy(), input_spans=(whole,), target_spans=targets)


def prompt(length: int, **fields: object) -> Span:
    return Span(kind="prompt", sequence_id="s", length=length, **fields)


def sampled(length: int) -> Span:
    return Span(kind="sampled", sequence_id="s", length=length)


@pytest.mark.parametrize("loss", [RL, STABLE])
def test_spans_become_a_mask_of_the_sampled_targets(loss: Loss):
    (example,) = parse([spanned(prompt(1), sampled(2))], loss)

    assert example.sampled.tolist() == [False, True, True]


def test_without_spans_nothing_is_known_of_the_targets():
    assert parse([policy()], RL)[0].sampled is None


BAD_SPANS = {
    "too short": (
        spanned(prompt(1), sampled(1)),
        "loss_fn_input_spans: the spans cover 2 positions, but there are 3",
    ),
    "other field": (
        spanned(prompt(1), sampled(2), tokens=4),
        "model_input_spans: the spans cover 4 positions, but there are 3",
    ),
    "only one field": (
        msgspec.structs.replace(policy(), target_spans=(sampled(3),)),
        "model_input_spans: the spans cover 0 positions, but there are 3",
    ),
    "negative length": (
        spanned(prompt(-1), sampled(4)),
        "loss_fn_input_spans[0].length: -1 is below 0",
    ),
    "negative offset": (
        spanned(prompt(1), prompt(2, offset=-3)),
        "loss_fn_input_spans[1].offset: -3 is below 0",
    ),
    "no id": (
        spanned(Span(kind="sampled", sequence_id="", length=3)),
        "loss_fn_input_spans[0].sequence_id: empty",
    ),
}


@pytest.mark.parametrize("loss", [RL, STABLE])
@pytest.mark.parametrize("case", BAD_SPANS)
def test_spans_that_do_not_tile_are_refused(case: str, loss: Loss):
    bad, message = BAD_SPANS[case]

    with pytest.raises(InvalidRequest, match=re.escape(f"data[0].{message}")):
        parse([bad], loss)


def test_without_spans_the_tokens_with_a_policy_were_sampled():
    inputs = {
        "logprobs": tensor([0, -1, 0], "float32"),
        "advantages": tensor([0, 0, 2], "float32"),
    }
    bare = Datum(tokens=GOOD.tokens, inputs={**policy().inputs, **inputs})

    (example,) = parse([bare], STABLE)

    assert example.inputs["sampled"].tolist() == [0, 1, 1]
    assert example.sampled is not None
    assert example.sampled.tolist() == [False, True, True]


def test_stable_reinforce_refuses_an_advantage_on_a_token_that_was_not_sampled():
    with pytest.raises(InvalidRequest, match=r"\['advantages'\]\[1\]: 1 on a token that was not"):
        parse([spanned(prompt(2), sampled(1))], STABLE)


def test_an_input_on_some_datums_only_is_missing_on_the_others():
    floats = tensor([0, 0, 0], "float32")
    targets = {"target_tokens": GOOD.inputs["target_tokens"], "logprobs": floats}
    whole = Datum(tokens=GOOD.tokens, inputs={**targets, "advantages": floats})
    partial = Datum(tokens=GOOD.tokens, inputs=targets)

    with pytest.raises(InvalidRequest, match=r"data\[1\].loss_fn_inputs\['advantages'\]: missing"):
        parse([whole, partial], RL)


def test_no_datums_are_refused():
    with pytest.raises(InvalidRequest, match="there are 0 datums; send at least 1"):
        parse([], CE)

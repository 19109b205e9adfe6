"""``asample`` bodies to bus messages: recorded ones, and those at the limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith import ids
from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith.messages.base import encode
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.sampling import Limits, Target, sample
from tinsmith_gateway.wire.seeds import SEED_RANGE, seed_for

SAMPLER = ids.sampler_id(ids.new_session_id(), 0)
TARGET = Target(request_id=f"{SAMPLER}:0", sampler_id=SAMPLER, base_model="m", adapter=None)
LIMITS = Limits(max_samples=8, max_topk=4, vocab_size=256, context_length=8)


def request(**fields):
    params = fields.pop("params", {})
    tokens = fields.pop("tokens", [5, 6, 7])
    body = {
        "sampling_session_id": SAMPLER,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": params,
    }
    return convert(body | fields)


def convert(body):
    import msgspec

    decoded = requests.decode(msgspec.json.encode(body), requests.Sample)
    return sample(decoded, TARGET, LIMITS)


@pytest.mark.parametrize(
    ("name", "tokens", "strings", "ignore_eos"),
    [
        ("stop_single_string", (), ("END",), False),
        ("stop_strings", (), ("\n",), False),
        ("stop_token_ids", (1, 2), (), False),
        ("stop_empty_list", (), (), True),
        ("topk", (), (), False),
    ],
)
def test_every_form_of_stop_is_told_apart(recorded, name, tokens, strings, ignore_eos):
    params = convert(recorded(f"asample_{name}")).params

    assert (params.stop_tokens, params.stop_strings, params.ignore_eos) == (
        tokens, strings, ignore_eos
    )  # fmt: skip


def test_the_recorded_parameters_arrive(recorded):
    message = convert(recorded("asample_stop_strings"))

    params = message.params
    assert (params.max_tokens, params.temperature, params.top_k) == (4, 0.7, 5)
    assert (params.top_p, params.seed, message.num_samples) == (0.9, 3, 2)


def test_compute_logprobs_arrives(recorded):
    message = convert(recorded("asample_compute_logprobs_last_n"))

    assert (message.prompt_logprobs, message.prompt_logprobs_last_n) == (True, 1)


def test_a_clone_s_sequence_number_arrives(recorded):
    assert convert(recorded("asample_cloned_client_random_block")).seq == 239437581000000000


def test_chunks_of_the_prompt_are_joined():
    chunks = [{"type": "encoded_text", "tokens": t} for t in ([1, 2], [], [3])]

    message = request(prompt={"chunks": chunks})

    assert np.frombuffer(message.prompt, "<i4").tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", [None, False])
def test_an_absent_flag_is_false(value):
    assert request(prompt_logprobs=value).prompt_logprobs is False


def test_a_prompt_of_one_token_can_be_scored():
    assert request(tokens=[1], prompt_logprobs=True, prompt_logprobs_last_n=1).prompt_logprobs


def test_null_parameters_are_the_defaults():
    params = {"temperature": None, "top_k": None, "top_p": None, "stop": None, "max_tokens": None}

    assert encode(request(params=params)) == encode(request())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -0.1}, "sampling_params.temperature: -0.1"),
        ({"top_p": 0}, "sampling_params.top_p: 0"),
        ({"top_p": 1.1}, "sampling_params.top_p: 1.1"),
        ({"top_k": 0}, "sampling_params.top_k: 0"),
        ({"top_k": -2}, "sampling_params.top_k: -2"),
        ({"max_tokens": 0}, "sampling_params.max_tokens: 0"),
        ({"stop": [1, "a"]}, "mixes strings and token ids"),
        ({"stop": ""}, "empty string"),
        ({"stop": [-1]}, "sampling_params.stop: -1"),
        ({"stop": [1.5]}, r"\$.sampling_params.stop"),
    ],
)
def test_a_parameter_out_of_range_is_named(params, words):
    with pytest.raises(InvalidRequest, match=words):
        request(params=params)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 1e-6}, {"top_k": 1}, {"top_k": 10**9}, {"top_p": 1}],
)
def test_a_parameter_at_its_limit_is_taken(params):
    ((name, value),) = params.items()

    assert getattr(request(params=params).params, name) == value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_samples": 0}, "num_samples: 0 is outside 1 to 8"),
        ({"num_samples": 9}, "num_samples: 9 is outside 1 to 8"),
        ({"topk_prompt_logprobs": 5}, "topk_prompt_logprobs: 5 is outside 0 to 4"),
        ({"topk_sample_logprobs": 5}, "topk_sample_logprobs: 5 is outside 0 to 4"),
        ({"prompt_alt_tokens_k": 5}, "prompt_alt_tokens_k: 5 is outside 0 to 4"),
        ({"prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n: 3 is outside 1 to 2"),
        ({"prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n: 0"),
        ({"tokens": []}, "prompt: has no tokens"),
        ({"prompt": {"chunks": []}}, "prompt: has no tokens"),
        ({"tokens": [-1]}, r"prompt\[0\]: token -1 is outside 0 to 255"),
        ({"tokens": [256]}, r"prompt\[0\]: token 256 is outside 0 to 255"),
        ({"tokens": [2**40]}, r"prompt.chunks\[0\].tokens"),
        ({"tokens": [1.5]}, r"\$.prompt.chunks"),
        ({"tokens": [1] * 9}, "9 tokens are over the model's context of 8"),
        ({"seq_id": -1}, r"\$.seq_id"),
    ],
)
def test_a_field_out_of_range_is_named(fields, words):
    with pytest.raises(InvalidRequest, match=words):
        request(**fields)


@pytest.mark.parametrize("kind", ["image", "image_asset_pointer", "dmel"])
def test_a_chunk_that_is_not_text_is_not_supported(kind):
    with pytest.raises(NotSupported, match=rf"prompt.chunks\[0\].*{kind}"):
        request(prompt={"chunks": [{"type": kind, "data": "aGk="}]})


def test_tokens_to_score_arrive(recorded):
    message = convert(recorded("asample_target_and_alt_tokens"))

    asked = message.target_tokens
    assert np.frombuffer(asked.tokens, "<i4").tolist() == [1, -1, 2, 3]
    assert (asked.cells.width, asked.cells.bounds, message.prompt_alt_tokens_k) == (2, b"", 2)


CSR = {"data": [4, 9], "shape": [2, 3]}
CSR |= {"sparse_crow_indices": [0, 0, 2], "sparse_col_indices": [0, 2]}


def test_sparse_tokens_to_score_arrive():
    cells = request(target_prompt_logprobs=CSR).target_tokens.cells

    assert (cells.width, np.frombuffer(cells.bounds, "<i8").tolist()) == (3, [0, 0, 2])
    assert np.frombuffer(cells.columns, "<i8").tolist() == [0, 2]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"dtype": "float32"}, "dtype float32"),
        ({"shape": None}, r"shape None for a prompt of 3 tokens; .* of shape \[2, K\]"),
        ({"shape": [3, 3]}, r"shape \[3, 3\]"),
        ({"shape": [2, 0]}, r"shape \[2, 0\]"),
        ({"shape": [2, 3, 1]}, r"shape \[2, 3, 1\]"),
        ({"data": [4, 256]}, r"data\[1\] is 256, not a token in 0\.\.255"),
        ({"data": [-2, 4]}, r"data\[0\] is -2"),
        ({"data": [2**63, 4]}, "data: not all are 64-bit"),
        ({"data": [-1, -1]}, "names no token"),
        ({"data": [1, 2, 3]}, "rise from 0 to the 3 items"),
        ({"sparse_crow_indices": [0, 2]}, "must be 3 numbers"),
        ({"sparse_crow_indices": [0, 3, 2]}, "rise from 0"),
        ({"sparse_crow_indices": [1, 1, 2]}, "rise from 0"),
        ({"sparse_crow_indices": [2**64, 0, 2]}, "sparse_crow_indices: not all"),
        ({"sparse_col_indices": [0]}, "sparse_col_indices as many"),
        ({"sparse_col_indices": [0, 3]}, r"not all in 0\.\.2"),
        ({"sparse_col_indices": [-1, 0]}, r"not all in 0\.\.2"),
        ({"sparse_col_indices": None}, r"2 items in data do not fill shape \[2, 3\]"),
    ],
)
def test_tokens_to_score_that_do_not_fit_are_named(tensor, words):
    with pytest.raises(InvalidRequest, match="target_prompt_logprobs: .*" + words):
        request(target_prompt_logprobs=CSR | tensor)


def test_a_hint_is_ignored(recorded):
    assert convert(recorded("asample_record_stability_info")).seq >= 0


def test_a_request_sent_again_without_a_seed_is_the_same_request():
    assert encode(request()) == encode(request())
    assert 0 <= request().params.seed < SEED_RANGE


@given(st.integers(-(2**63), 2**64 - 1))
def test_any_seed_of_64_bits_is_folded_into_range(seed):
    assert 0 <= seed_for(seed, "x") < SEED_RANGE
    if 0 <= seed < SEED_RANGE:
        assert seed_for(seed, "x") == seed

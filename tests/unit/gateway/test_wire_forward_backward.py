"""Training requests from protobuf to op, by the bytes that a client sent and broken ones."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith import ids
from tinsmith.errors import InvalidRequest
from tinsmith.messages.base import Tensor, encode
from tinsmith.messages.ops import ForwardBackward, Refused, Span
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb
from tinsmith_gateway.wire.forward_backward import Bounds, from_proto, place_in

MODEL = ids.model_id(ids.new_session_id(), 0)
LIMIT = 1 << 20


@pytest.fixture
def example(recorded):
    def get(name):
        return recorded(f"forward_{name}", model_id=MODEL)

    return get


def body_of(message, *, max_bytes=LIMIT):
    return from_proto(message.SerializeToString(), Bounds(max_bytes))[1]


def refusal(message, **kwargs):
    body = body_of(message, **kwargs)
    assert isinstance(body, Refused), body
    return body.reason


def int64(*values):
    return np.array(values, "<i8").tobytes()


def test_the_place_is_that_of_the_request(example):
    message = example("backward_cross_entropy")

    place, _ = from_proto(message.SerializeToString(), Bounds(LIMIT))

    assert (place.model_id, place.seq_id) == (MODEL, 1)


def test_tensors_keep_their_bytes_and_shapes(example):
    message = example("backward_cross_entropy")

    datum = body_of(message).data[0]

    assert datum.tokens == Tensor("int32", (4,), np.arange(4, dtype="<i4").tobytes())
    assert datum.inputs["target_tokens"] == Tensor("int64", (4,), int64(1, 2, 3, 4))
    assert datum.inputs["weights"] == Tensor("float32", (4,), np.ones(4, "<f4").tobytes())


def test_forward_only_and_the_loss_are_passed_on(example):
    body = body_of(example("only_cross_entropy"))

    assert (body.loss_fn, body.forward_only) == ("cross_entropy", True)


def test_numbers_and_texts_of_the_newer_loss_config_win(example):
    message = example("backward_ppo")
    message.loss_fn_config["clip_low_threshold"] = 0.1
    message.loss_fn_config_v2["mode"].text = "x"

    assert body_of(message).loss_config == {
        "clip_high_threshold": 1.2,
        "clip_low_threshold": 0.8,
        "mode": "x",
    }


def test_the_older_loss_config_is_used_when_it_stands_alone(example):
    message = example("backward_cross_entropy")
    message.loss_fn_config["beta"] = 0.5

    assert body_of(message).loss_config == {"beta": 0.5}


def test_a_sparse_tensor_becomes_dense(example):
    message = example("backward_sparse_csr_topk_targets")

    targets = body_of(message).data[0].inputs["target_tokens"]

    dense = np.frombuffer(targets.data, "<i8").reshape(targets.shape)
    expected = np.zeros((6, 50), dtype=np.int64)
    expected[:, 0] = [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize(
    "name",
    ["provenance", "stable_reinforce_with_config", "custom_server_side", "ppo", "zstd"],
)
def test_every_recorded_text_request_is_taken(example, name):
    assert isinstance(body_of(example(f"backward_{name}")), ForwardBackward)


def test_equal_requests_give_equal_ops_whatever_the_order_of_their_maps(example):
    one, other = example("backward_ppo"), example("backward_ppo")
    copied = {
        key: pb.Tensor.FromString(value.SerializeToString())
        for key, value in one.data[0].loss_fn_inputs.items()
    }
    other.data[0].loss_fn_inputs.clear()
    for key in sorted(copied, reverse=True):
        other.data[0].loss_fn_inputs[key].CopyFrom(copied[key])

    assert encode(body_of(one)) == encode(body_of(other))


def test_provenance_is_passed_on(example):
    datum = body_of(example("backward_provenance")).data[0]

    assert datum.input_spans == (
        Span(kind="prompt", sequence_id="s:0", length=2),
        Span(kind="sampled", sequence_id="s:0", length=2),
    )
    assert datum.target_spans == (Span(kind="sampled", sequence_id="s:0", length=4),)


def test_a_datum_without_provenance_has_no_spans(example):
    datum = body_of(example("backward_ppo")).data[0]

    assert (datum.input_spans, datum.target_spans) == ((), ())


def test_a_span_of_no_kind_is_refused(example):
    message = example("backward_provenance")
    message.data[0].loss_fn_input_spans.add()

    assert "data[0].loss_fn_input_spans[1]: has neither" in refusal(message).message


def test_dense_rows_of_targets_keep_their_shape(example):
    message = example("backward_cross_entropy")
    targets = message.data[0].loss_fn_inputs["target_tokens"]
    targets.dense, targets.shape[:] = int64(1, 2, 3, 4), [2, 2]

    assert body_of(message).data[0].inputs["target_tokens"].shape == (2, 2)


def test_chunks_of_text_are_joined(example):
    message = example("backward_cross_entropy")
    message.data[0].model_input.add().encoded_text.tokens = np.array([9], "<i4").tobytes()

    assert body_of(message).data[0].tokens.shape == (5,)


def test_an_image_is_refused_in_its_place(example):
    failure = refusal(example("backward_image_chunk"))

    assert failure.code == "NotSupported"
    assert "data[0].model_input[1]" in failure.message
    assert "'image'" in failure.message


def test_tokens_that_are_no_int32_are_refused(example):
    message = example("backward_cross_entropy")
    message.data[1].model_input[0].encoded_text.tokens = b"123"

    assert "data[1].model_input: 3 bytes" in refusal(message).message


def test_bytes_that_do_not_fit_the_shape_are_refused(example):
    message = example("backward_cross_entropy")
    message.data[1].loss_fn_inputs["weights"].shape[:] = [5]

    assert refusal(message).message == (
        "data[1].loss_fn_inputs['weights']: 16 bytes do not fit shape [5] of float32, which has 20"
    )


def test_a_tensor_without_shape_is_one_dimensional(example):
    message = example("backward_cross_entropy")
    message.data[0].loss_fn_inputs["weights"].ClearField("shape")

    assert body_of(message).data[0].inputs["weights"].shape == (4,)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [([-4], 1, "negative size"), ([4], 0, "dtype 0 is unknown"), ([4], 99, "dtype 99 is unknown")],
)
def test_a_tensor_that_makes_no_sense_is_refused(example, shape, dtype, words):
    message = example("backward_cross_entropy")
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.shape[:], tensor.dtype = shape, dtype

    assert words in refusal(message).message


@pytest.mark.parametrize(
    ("field", "data", "words"),
    [
        ("col_indices", int64(0, 0, 0, 0, 0, 50), "col_indices are outside 0..49"),
        ("col_indices", int64(0, 0, 0, 0, 0, -1), "col_indices are outside 0..49"),
        ("col_indices", int64(0), "8 bytes are not 6 items"),
        ("crow_indices", int64(0, 1, 2, 3, 4, 6), "48 bytes are not 7 items"),
        ("crow_indices", int64(1, 1, 2, 3, 4, 5, 6), "do not rise from 0"),
        ("crow_indices", int64(0, 2, 1, 3, 4, 5, 6), "do not rise from 0"),
        ("crow_indices", int64(0, 2, 2, 3, 4, 5, 6), "given twice"),
        ("crow_indices", int64(0, 0, 0, 0, 0, 0, -6), "48 bytes are not -6 items"),
        ("values", int64(1), "8 bytes are not 6 items"),
    ],
)
def test_a_broken_sparse_tensor_is_refused(example, field, data, words):
    message = example("backward_sparse_csr_topk_targets")
    setattr(message.data[0].loss_fn_inputs["target_tokens"].sparse_csr, field, data)

    assert words in refusal(message).message


def test_a_sparse_tensor_of_one_dimension_is_refused(example):
    message = example("backward_sparse_csr_topk_targets")
    message.data[0].loss_fn_inputs["target_tokens"].shape[:] = [6]

    assert "two dimensions" in refusal(message).message


def test_a_sparse_tensor_that_would_fill_the_memory_is_refused(example):
    message = example("backward_sparse_csr_topk_targets")
    message.data[0].loss_fn_inputs["target_tokens"].shape[:] = [6, 1 << 50]

    failure = refusal(message)

    assert (failure.code, str(LIMIT) in failure.message) == ("TooLarge", True)


def test_the_limit_on_sparse_tensors_holds_for_all_datums_together(example):
    message = example("backward_sparse_csr_topk_targets")
    size = 6 * 50 * (8 + 4)
    assert isinstance(body_of(message, max_bytes=size), ForwardBackward)
    message.data.add().CopyFrom(message.data[0])

    assert refusal(message, max_bytes=size).code == "TooLarge"


def test_a_loss_value_of_no_kind_is_refused(example):
    message = example("backward_ppo")
    message.loss_fn_config_v2["mode"].SetInParent()

    assert "loss_fn_config_v2['mode']" in refusal(message).message


@pytest.mark.parametrize("raw", [b"\xff\xff", b"{}"])
def test_bytes_that_are_no_request_cannot_be_attributed(raw):
    with pytest.raises(InvalidRequest, match="not a ForwardBackwardRequest"):
        from_proto(raw, Bounds(LIMIT))


@pytest.mark.parametrize("fields", [{"model_id": "x"}, {"seq_id": 0}, {"seq_id": -1}])
def test_a_request_without_a_place_cannot_be_attributed(recorded, fields):
    message = recorded("forward_backward_ppo", **({"model_id": MODEL} | fields))

    with pytest.raises(InvalidRequest):
        from_proto(message.SerializeToString(), Bounds(LIMIT))


@pytest.mark.parametrize("seq", [1, 127, 128, 2**31 - 1])
def test_the_place_can_be_told_from_the_first_bytes(example, seq):
    message = example("backward_cross_entropy")
    message.seq_id = seq

    place = place_in(message.SerializeToString()[:64])

    assert (place.model_id, place.seq_id) == (MODEL, seq)


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"\x0a",
        b"\x0a\x05abcde",
        b"\x0a\x02ab\x10",
        b"\x0a\x02ab\x10\x01",
        b"\x1a\x00\x10\x01",
        b"\x0a\x02\xff\xff\x10\x01",
        b"\x0a\x00\x10\xff\xff\xff\xff\xff\xff",
    ],
)
def test_first_bytes_that_tell_no_place_are_passed_over(prefix):
    assert place_in(prefix) is None

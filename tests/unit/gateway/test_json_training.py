"""Training requests in JSON: the same op as from protobuf, and errors that name the field."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.unit.gateway.conftest import RECORDED

from tinsmith import ids
from tinsmith.messages.ops import ForwardBackward, Refused
from tinsmith.messages.table import OPS
from tinsmith_gateway.config import MIB, GatewayConfig
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb
from tinsmith_gateway.wire.forward_backward import Bounds, from_json, from_proto
from tinsmith_gateway.wire.json_training import place_in

MODEL = ids.model_id(ids.new_session_id(), 0)
LIMITS = Bounds(1 << 20)
DTYPES = {pb.DTYPE_FLOAT32: ("float32", "<f4"), pb.DTYPE_INT64: ("int64", "<i8")}
PLAIN = sorted(
    name
    for name, example in RECORDED.items()
    if name.startswith("forward_") and "body_b64" in example and "image" not in name
)


@pytest.fixture
def config():
    return GatewayConfig(long_poll_s=0.3, max_json_bytes=MIB)


def numbers(data, dtype):
    return np.frombuffer(data, dtype).tolist()


def in_json(tensor):
    """A protobuf tensor as older clients write it."""
    name, kind = DTYPES[tensor.dtype]
    answer = {"dtype": name, "shape": list(tensor.shape), "data": numbers(tensor.dense, kind)}
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        answer["data"] = numbers(csr.values, kind)
        answer["sparse_crow_indices"] = numbers(csr.crow_indices, "<i8")
        answer["sparse_col_indices"] = numbers(csr.col_indices, "<i8")
    return answer


def chunk(part):
    return {"type": "encoded_text", "tokens": numbers(part.encoded_text.tokens, "<i4")}


def body(message, **fields):
    """A protobuf request as older clients write it; the place comes last."""
    kind = "forward_input" if message.forward_only else "forward_backward_input"
    asked = {
        "data": [
            {
                "loss_fn_inputs": {k: in_json(v) for k, v in datum.loss_fn_inputs.items()},
                "model_input": {"chunks": [chunk(part) for part in datum.model_input]},
            }
            for datum in message.data
        ],
        "loss_fn": message.loss_fn,
        "loss_fn_config": dict(message.loss_fn_config),
    }
    return {kind: asked | fields, "model_id": message.model_id, "seq_id": message.seq_id}


def one(**inputs):
    """A request of one datum."""
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "loss_fn_inputs": inputs,
    }
    return {
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
        "model_id": MODEL,
        "seq_id": 1,
    }


def parsed(request, **kwargs):
    return from_json(json.dumps(request).encode(), LIMITS, **kwargs)


@pytest.mark.parametrize("name", PLAIN)
def test_both_forms_of_a_request_are_the_same_op(recorded, name):
    message = recorded(name, model_id=MODEL)
    for datum in message.data:
        del datum.model_input_spans[:], datum.loss_fn_input_spans[:]  # older clients have none
    message.loss_fn_config_v2.clear()

    place, op = parsed(body(message), forward_only=message.forward_only)

    assert (place, op) == from_proto(message.SerializeToString(), LIMITS)
    assert isinstance(op, ForwardBackward)


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        ({"dtype": "int64", "data": [1.5]}, "Expected `int`, got `float` - at `$[0]`"),
        ({"dtype": "int64", "data": [2**70]}, "integers of 8 bytes"),
        ({"dtype": "int64", "data": [2**63]}, "integers of 8 bytes"),
        ({"dtype": "int64", "data": {}}, "Expected `array`"),
        ({"dtype": "float32", "data": [None]}, "Expected `float`, got `null`"),
        ({"dtype": "float16", "data": []}, "dtype"),
        ({"dtype": "int64", "data": [1], "shape": [2]}, "do not fit shape [2]"),
        ({"dtype": "int64", "data": [1], "shape": [-1]}, ">= 0"),
        ({"dtype": "int64", "data": [1], "sparse_crow_indices": [0, 1]}, "sparse_col_indices"),
    ],
)
def test_a_wrong_tensor_fails_the_future_by_name(tensor, told):
    place, op = parsed(one(target_tokens=tensor))

    assert (place.model_id, place.seq_id) == (MODEL, 1)
    assert isinstance(op, Refused)
    assert told in op.reason.message


def test_an_image_goes_the_way_of_one_in_protobuf():
    request = one()
    image = {"type": "image", "data": "eHl6", "format": "png", "expected_tokens": 3}
    request["forward_backward_input"]["data"][0]["model_input"]["chunks"] = [image]
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    part = message.data.add().model_input.add().image
    part.data, part.format, part.expected_tokens = b"xyz", "png", 3

    assert parsed(request) == from_proto(message.SerializeToString(), LIMITS)


@pytest.mark.parametrize("kind", ["dmel", "image_asset_pointer", "other"])
def test_other_chunks_are_refused_by_kind(kind):
    request = one()
    request["forward_backward_input"]["data"][0]["model_input"]["chunks"] = [{"type": kind}]

    assert repr(kind) in parsed(request)[1].reason.message


async def test_forward_leaves_the_gradient_alone(rig, recorded):
    message = recorded("forward_only_cross_entropy", model_id=await rig.model())

    answer = await rig.post("forward", body(message))

    assert (answer.status, rig.bus.queued(OPS)[-1].body.forward_only) == (200, True)


async def test_a_request_that_is_too_large_takes_its_place(rig):
    model = await rig.model()
    request = one(weights={"dtype": "float32", "data": [0.5] * MIB}) | {"model_id": model}

    raw, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
    answer = await rig.call("POST", "/api/v1/forward_backward", data=raw, headers=headers)
    op = rig.bus.queued(OPS)[-1]

    assert answer.json["request_id"] == f"{model}:1"
    assert isinstance(op.body, Refused)
    assert "gateway.max_json_bytes" in op.body.reason.message


@pytest.mark.parametrize(
    "end",
    [
        b"",
        b'"seq_id": 1}',
        f'"model_id": "{MODEL}"'.encode(),
        b'"model_id": "x", "seq_id": 1}',
        b'"model_id": "\xff", "seq_id": 1}',
        f'"model_id": "{MODEL}", "seq_id": 0}}'.encode(),
        f'"model_id": "{MODEL}", "seq_id": 9999999999}}'.encode(),
        f'"model_id": "{MODEL}", "seq_id": 1.5}}'.encode(),
    ],
    ids=["none", "number", "open", "name", "bytes", "zero", "large", "fraction"],
)
def test_last_bytes_that_tell_no_place_are_passed_over(end):
    assert place_in(end) is None

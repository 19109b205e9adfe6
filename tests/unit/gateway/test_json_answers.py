"""Results in JSON for those who ask for it: the numbers of the protobuf ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tinsmith.messages import ops, sampling
from tinsmith.messages.base import Tensor
from tinsmith.messages.table import OPS, SAMPLES
from tinsmith_gateway.wire import json_answers, results

JSON = {"Accept": "application/json"}
BOTH = {"Accept": "application/x-protobuf, application/json"}


def tensor(dtype, kind, shape, *values):
    return Tensor(dtype, shape, np.array(values, kind).tobytes())


def passed(*logprobs, **metrics):
    done = ops.ForwardBackwardDone(logprobs=logprobs, metrics={"loss:sum": 1.5, **metrics})
    return json_answers.of(results.forward_backward_output(done), "train")


def loaded(payload):
    return json.loads(payload.body)


def test_datums_keep_their_order_and_shapes():
    one = tensor("float32", "<f4", (2,), -1, -2)
    two = tensor("float32", "<f4", (1, 2), -3, -4)

    answer = loaded(passed(one, two, one))

    assert [output["logprobs"] for output in answer["loss_fn_outputs"]] == [
        {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]},
        {"data": [-3.0, -4.0], "dtype": "float32", "shape": [1, 2]},
        {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]},
    ]
    assert answer["metrics"] == {"loss:sum": 1.5}


def test_a_halved_float_is_widened():
    bits = Tensor("bfloat16", (1,), np.array([0xBF80], "<u2").tobytes())

    output = loaded(passed(bits))["loss_fn_outputs"][0]["logprobs"]

    assert output == {"data": [-1.0], "dtype": "float32", "shape": [1]}


def test_what_json_has_no_number_for_is_a_text():
    answer = loaded(passed(tensor("float32", "<f4", (2,), math.nan, -1), **{"x:sum": math.inf}))

    assert answer["loss_fn_outputs"][0]["logprobs"]["data"] == ["nan", -1.0]
    assert answer["metrics"]["x:sum"] == "inf"


def test_a_sample_has_its_tokens_and_logprobs():
    done = sampling.SampleDone(
        request_id="r",
        sequences=(
            sampling.Sequence(
                stop_reason="length",
                tokens=np.array([7, 8], "<i4").tobytes(),
                logprobs=np.array([-1, -2], "<f4").tobytes(),
            ),
        ),
        prompt_logprobs=np.array([math.nan, -0.5], "<f4").tobytes(),
        topk_prompt_logprobs=sampling.TopK(
            k=1,
            length=2,
            token_ids=np.array([0, 9], "<i4").tobytes(),
            logprobs=np.array([-99999.0, -3], "<f4").tobytes(),
        ),
    )

    answer = loaded(json_answers.of(results.sample_response(done), "sample"))

    assert answer["sequences"] == [
        {"stop_reason": "length", "tokens": [7, 8], "logprobs": [-1.0, -2.0]}
    ]
    assert answer["prompt_logprobs"] == [None, -0.5]
    assert answer["topk_prompt_logprobs"] == [None, [[9, -3.0]]]


@pytest.mark.parametrize(
    ("headers", "kind"),
    [(JSON, "application/json"), (BOTH, "application/x-protobuf"), ({}, "application/x-protobuf")],
)
async def test_who_asks_for_json_alone_is_given_it(rig, recorded, headers, kind):
    message = recorded("forward_backward_cross_entropy", model_id=await rig.model())
    future = (await rig.post_proto(message)).json["request_id"]
    done = ops.ForwardBackwardDone(
        logprobs=(tensor("float32", "<f4", (1,), -1),), metrics={"loss:sum": 1.0}
    )
    await rig.bus.finish_op(rig.bus.queued(OPS)[-1], done)

    answer = await rig.poll(future, headers=headers)

    assert (answer.status, answer.headers["Content-Type"].partition(";")[0]) == (200, kind)


async def test_a_sample_in_json_goes_over_the_wire(rig, recorded):
    body = recorded("asample_topk", sampling_session_id=await rig.sampler())
    await rig.post("asample", body)
    sample = rig.bus.queued(SAMPLES)[0]
    await rig.bus.finish_sample(sample, sampling.SampleDone(request_id=sample.request_id))

    answer = await rig.poll(sample.request_id, headers=JSON)

    assert (answer.json["type"], answer.json["sequences"]) == ("sample", [])

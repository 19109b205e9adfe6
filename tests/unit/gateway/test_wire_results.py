"""Results as the client reads them: its own code decodes what we encode."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from tinsmith.messages import ops, sampling
from tinsmith.messages.base import Failed, Tensor
from tinsmith_gateway.wire import results


def floats(*values):
    return np.array(values, "<f4").tobytes()


def ints(*values):
    return np.array(values, "<i4").tobytes()


def tensor(values):
    array = np.array(values, "<f4")
    return Tensor("float32", array.shape, array.tobytes())


def read(logprobs, metrics=None):
    done = ops.ForwardBackwardDone(
        logprobs=tuple(map(tensor, logprobs)), metrics=metrics or {"loss:sum": 1.0}
    )
    return deserialize_forward_backward_output(results.forward_backward_output(done))


def lists(output):
    return [datum["logprobs"].to_numpy().tolist() for datum in output.loss_fn_outputs]


def test_logprobs_come_back_by_datum_in_order():
    datums = [[-1.0, -2.0], [-3.0], [-4.0, -5.0, -6.0]]

    assert lists(read(datums)) == datums


def test_two_dimensional_logprobs_keep_their_shape():
    datums = [[[-1.0, -2.0]], [[-3.0, -4.0], [-5.0, -6.0]]]

    assert lists(read(datums)) == datums


def test_datums_of_different_widths_keep_their_order():
    datums = [[-1.0], [[-2.0, -3.0]], [-4.0], [[-5.0, -6.0, -7.0]]]

    assert lists(read(datums)) == datums


def test_a_request_without_datums_has_a_result():
    assert lists(read([])) == []


def test_a_datum_without_tokens_keeps_its_place():
    assert lists(read([[], [-1.0]])) == [[], [-1.0]]


def test_metrics_come_back_as_they_are():
    output = read([], {"loss:sum": math.nan, "tokens:sum": 3.0})

    assert math.isnan(output.metrics["loss:sum"])
    assert output.metrics["tokens:sum"] == 3.0


def test_a_metric_that_the_client_would_stumble_over_is_left_out():
    assert read([], {"loss:sum": 1.0, "bare": 1.0, "a:b:sum": 1.0}).metrics == {"loss:sum": 1.0}


def test_a_sample_comes_back_whole():
    sequences = (
        sampling.Sequence(tokens=ints(5, 6), logprobs=floats(-0.5, 0), stop_reason="stop"),
        sampling.Sequence(tokens=ints(7), logprobs=floats(-1), stop_reason="length"),
    )
    done = sampling.SampleDone(request_id="r", sequences=sequences, prompt_cache_hit_tokens=3)

    response = deserialize_sample_response(results.sample_response(done))

    assert [s.tokens for s in response.sequences] == [[5, 6], [7]]
    assert [s.logprobs for s in response.sequences] == [[-0.5, 0.0], [-1.0]]
    assert [s.stop_reason for s in response.sequences] == ["stop", "length"]
    assert response.prompt_cache_hit_tokens == 3


def test_prompt_logprobs_and_top_k_come_back():
    topk = sampling.TopK(
        token_ids=ints(0, 0, 4, 5), logprobs=floats(-99999, -99999, -1, -2), k=2, length=2
    )
    done = sampling.SampleDone(
        request_id="r", prompt_logprobs=floats(math.nan, -2), topk_prompt_logprobs=topk
    )

    response = deserialize_sample_response(results.sample_response(done))

    assert response.prompt_logprobs == [None, -2.0]
    assert response.topk_prompt_logprobs == [None, [(4, -1.0), (5, -2.0)]]


def test_top_k_of_sampled_tokens_comes_back():
    topk = sampling.TopK(token_ids=ints(4, 5), logprobs=floats(-1, -2), k=2, length=1)
    sequence = sampling.Sequence(tokens=ints(4), logprobs=floats(-1), stop_reason="stop", topk=topk)
    done = sampling.SampleDone(request_id="r", sequences=(sequence,))

    response = deserialize_sample_response(results.sample_response(done))

    assert response.sequences[0].topk_logprobs == [[(4, -1.0), (5, -2.0)]]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (
            ops.CreateModelDone(model_id="m", lora=ops.LoraShape()),
            {"type": "create_model", "model_id": "m"},
        ),
        (
            ops.LoadWeightsDone(path="p"),
            {"type": "load_weights", "path": "p", "model_id": "m"},
        ),
        (ops.SaveWeightsDone(path="p", size_bytes=3), {"type": "save_weights", "path": "p"}),
        (
            ops.SaveWeightsExternalDone(path="p", size_bytes=3),
            {"type": "save_weights_external", "path": "p", "size_bytes": 3},
        ),
        (
            ops.SaveWeightsForSamplerDone(path="p"),
            {"type": "save_weights_for_sampler", "path": "p"},
        ),
        (
            ops.SaveWeightsForSamplerDone(path="ephemeral", sampling_session_id="s"),
            {"type": "save_weights_for_sampler", "sampling_session_id": "s"},
        ),
        (
            ops.OptimStepDone(metrics={"lr": 1.0, "grad_norm": math.inf}),
            {"metrics": {"lr": 1.0, "grad_norm": "inf"}},
        ),
        (Failed(category="user", message="no"), {"error": "no", "category": "user"}),
    ],
)
def test_every_other_result_is_the_json_of_the_contract(result, expected):
    payload = results.op_payload(result, model_id="m")

    assert (payload.content_type, json.loads(payload.body)) == (results.JSON, expected)


def test_a_model_from_a_checkpoint_answers_as_load_weights_does():
    result = ops.CreateModelDone(model_id="m", lora=ops.LoraShape())

    payload = results.op_payload(result, model_id="m", checkpoint="tinker://x")

    assert json.loads(payload.body) == {
        "type": "load_weights", "path": "tinker://x", "model_id": "m"
    }  # fmt: skip


def test_a_failed_sample_is_a_failed_future():
    failed = sampling.SampleFailed(
        request_id="r", failure=Failed(category="server", message="lost")
    )

    payload = results.sample_payload(failed)

    assert json.loads(payload.body) == {"error": "lost", "category": "server"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.25])
def test_the_client_reads_every_metric_of_a_step_as_the_number_it_is(value):
    from tinker.types import OptimStepResponse

    payload = results.op_payload(ops.OptimStepDone(metrics={"x": value}), model_id="m")

    np.testing.assert_equal(OptimStepResponse.model_validate_json(payload.body).metrics["x"], value)

"""Below the client: requests out of order, sent twice, or wrong, over plain HTTP."""

from __future__ import annotations

import urllib.request

import numpy as np
import pytest
from tests.integration.steps import new_model
from tinker.proto import tinker_public_pb2 as pb

OLD_KEY = "tml-somebody-else"


@pytest.fixture
def model_id(client):
    return new_model(client).model_id


def chunk(model_id, seq, start):
    """A forward_backward request as the client encodes it."""
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn="cross_entropy")
    datum = request.data.add()
    tokens = np.arange(start, start + 8, dtype="<i4")
    datum.model_input.add().encoded_text.tokens = tokens.tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = (tokens + 1).astype("<i8").tobytes(), pb.DTYPE_INT64
    targets.shape.append(8)
    return request.SerializeToString()


def post_chunk(server, model_id, seq, start):
    body = chunk(model_id, seq, start)
    status, promise = server.post("forward_backward", body, content_type="application/x-protobuf")
    assert status == 200, promise
    return promise["request_id"]


def loss(server, request_id):
    """Poll like the client; the loss of the result."""
    url = f"{server.base_url}/api/v1/retrieve_future"
    headers = {"X-API-Key": server.api_key, "Content-Type": "application/json"}
    headers["Accept"] = "application/x-protobuf"
    body = f'{{"request_id": "{request_id}", "allow_metadata_only": false}}'.encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return pb.ForwardBackwardOutput.FromString(answer.read()).metrics["loss:sum"]


def test_chunks_are_promised_at_once_in_any_order(server, model_id):
    promises = {seq: post_chunk(server, model_id, seq, 5 + seq) for seq in (2, 3, 4, 1, 5)}
    losses = [loss(server, promises[seq]) for seq in (1, 2, 3, 4, 5)]

    assert len(set(losses)) == 5
    assert all(value > 0 for value in losses)


def test_a_request_sent_twice_has_one_promise_and_one_result(server, model_id):
    first, again = (post_chunk(server, model_id, 1, 5) for _ in range(2))
    done = loss(server, first)
    late = post_chunk(server, model_id, 1, 5)

    assert first == again == late
    assert loss(server, late) == done


def test_a_result_can_be_read_again(server, model_id):
    promise = post_chunk(server, model_id, 1, 5)

    assert loss(server, promise) == loss(server, promise)


def test_a_wrong_key_is_refused(server):
    stranger = type(server)(server.base_url, OLD_KEY, server.folder, server.process)
    status, answer = stranger.post("create_session", {"sdk_version": "0.38.0"})

    assert status == 401
    assert "key" in answer["detail"]


def test_a_future_nobody_promised_is_not_found(server, model_id):
    status, answer = server.post("retrieve_future", {"request_id": f"{model_id}:99"})

    assert status == 404
    assert answer["detail"]


def test_a_bad_recipient_fails_its_future_and_uses_up_its_seq(server, model_id):
    body = {"model_id": model_id, "seq_id": 1, "path": "x", "age_encryption_recipients": ["k"]}
    _, promise = server.post("save_weights_external", body)
    status, failed = server.post("retrieve_future", {"request_id": promise["request_id"]})

    assert status == 200
    assert "age_encryption_recipients[0]: 'k' is no age recipient" in failed["error"]
    assert loss(server, post_chunk(server, model_id, 2, 5)) > 0


def test_a_failed_future_is_an_answer_and_the_next_request_works(server, model_id):
    request = pb.ForwardBackwardRequest.FromString(chunk(model_id, 1, 5))
    request.loss_fn = "no_such_loss"
    status, promise = server.post(
        "forward_backward", request.SerializeToString(), content_type="application/x-protobuf"
    )
    status, failed = server.post("retrieve_future", {"request_id": promise["request_id"]})

    assert status == 200
    assert failed["category"] == "user"
    assert "no_such_loss" in failed["error"]
    assert loss(server, post_chunk(server, model_id, 2, 5)) > 0

"""Requests as the client sends them, one by one, for what the client itself would not do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import numpy as np
from tests.fault.cluster import until
from tests.integration.conftest import MODEL
from tinker.proto import tinker_public_pb2 as pb

JSON, PROTOBUF = "application/json", "application/x-protobuf"


def ask(server, path, body, *, accept=JSON):
    """(status, headers, body) of a POST; ``body`` is JSON, or bytes in protobuf."""
    is_raw = isinstance(body, bytes)
    headers = {"X-API-Key": server.api_key, "Accept": accept}
    headers["Content-Type"] = PROTOBUF if is_raw else JSON
    data = body if is_raw else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.base_url}/api/v1/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def told(server, path, body):
    """The JSON of an answer that must be a good one."""
    status, _, answer = ask(server, path, body)
    assert status == 200, answer
    return json.loads(answer)


def new_session(server):
    return told(server, "create_session", {"tags": [], "user_metadata": {}})["session_id"]


def finish(server, session):
    body = {"reason": {"type": "success"}, "detail": None}
    assert ask(server, f"sessions/{session}/finish", body)[0] < 300


def create(server, session, *, order=0):
    """The promise of a new model: its id, and its request's."""
    lora = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body = {"session_id": session, "model_seq_id": order, "base_model": MODEL}
    more = {"lora_config": lora, "optimizer_config": {"type": "adamw"}}
    return told(server, "create_model", body | more)


def new_model(server, session):
    """A model that exists; its id."""
    promise = create(server, session)
    assert "error" not in result(server, promise["request_id"])
    return promise["model_id"]


def batch(model, seq, *, length=8, datums=1):
    """A forward_backward request."""
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    tokens = (5 + seq + np.arange(length, dtype="<i4")) % 200
    for _ in range(datums):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = tokens.astype("<i8").tobytes(), pb.DTYPE_INT64
        targets.shape.append(length)
    return request.SerializeToString()


def step(model, seq):
    """An optim_step request."""
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-2}}


def post(server, model, seq, **options):
    """Backward passes at odd seqs, steps at even ones; (status, headers, answer)."""
    if seq % 2:
        return ask(server, "forward_backward", batch(model, seq, **options))
    return ask(server, "optim_step", step(model, seq))


def promised(server, model, seq, **options):
    """The id of a request that was taken."""
    status, _, answer = post(server, model, seq, **options)
    assert status == 200, answer
    return json.loads(answer)["request_id"]


def poll(server, request_id):
    """(status, raw answer): 408 while there is none."""
    body = {"request_id": request_id, "allow_metadata_only": False}
    status, _, answer = ask(server, "retrieve_future", body, accept=PROTOBUF)
    return status, answer


def raw_result(server, request_id):
    """Poll until there is a result; its bytes."""

    def found():
        status, answer = poll(server, request_id)
        assert status in (200, 408), answer
        return answer if status == 200 else None

    return until(found, f"the result of {request_id}")


def read_result(server, request_id):
    """A result of any kind, comparable: maps in protobuf have no order."""
    raw = raw_result(server, request_id)
    return json.loads(raw) if raw[:1] == b"{" else pb.ForwardBackwardOutput.FromString(raw)


def result(server, request_id):
    """A result that is JSON: of anything but a backward pass that went well."""
    return json.loads(raw_result(server, request_id))


def why_waiting(server, request_id):
    """Poll until the client is told why it has to wait."""

    def reason():
        status, answer = poll(server, request_id)
        assert status == 408, answer
        state = json.loads(answer)
        return state.get("queue_state_reason") if state["queue_state"] != "active" else None

    return until(reason, f"why {request_id} waits")

"""Wrong requests in the middle of a run: each fails, saying what is wrong, and that is all."""

from __future__ import annotations

import io
import json
import math
import tarfile
import urllib.error
import urllib.request

import numpy as np
import pytest
from tests.integration.conftest import MODEL
from tests.integration.steps import new_model
from tests.integration.test_wire import chunk
from tinker.proto import tinker_public_pb2 as pb

PROTOBUF = "application/x-protobuf"
NAN, INF = math.nan, math.inf


class Run:
    """A model that is driven below the client, with its count of requests."""

    def __init__(self, server, model_id):
        self.server = server
        self.model_id = model_id
        self.seq = 0

    def ask(self, path, /, **body):
        """The promise of a JSON request."""
        self.seq += 1
        body = {"model_id": self.model_id, "seq_id": self.seq} | body
        return promised(self.server.post(path, body))

    def train(self, change=lambda request, datum: None, *, start=5):
        """The promise of two datums, the second of them as ``change`` leaves it."""
        self.seq += 1
        request = pb.ForwardBackwardRequest.FromString(chunk(self.model_id, self.seq, start))
        request.data.add().CopyFrom(request.data[0])
        change(request, request.data[1])
        raw = request.SerializeToString()
        return promised(self.server.post("forward_backward", raw, content_type=PROTOBUF))

    def step(self, **params):
        return self.ask("optim_step", adam_params={"learning_rate": 1e-2} | params)

    def logprobs(self):
        def score(request, _):
            request.forward_only = True

        output = pb.ForwardBackwardOutput.FromString(poll(self.server, self.train(score)))
        return [record.fields["logprobs"].data for record in output.loss_fn_outputs]

    def saved(self):
        """The bytes of the weights and of the optimizer's state."""
        path = json.loads(poll(self.server, self.ask("save_weights", path="end")))["path"]
        run_id, kind, name = path.removeprefix("tinker://").split("/")
        url = f"{self.server.base_url}/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
        request = urllib.request.Request(f"{url}/archive", headers=key(self.server))
        with urllib.request.urlopen(request, timeout=60) as answer:
            tar = tarfile.open(fileobj=io.BytesIO(answer.read()))  # noqa: SIM115
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}
        return {name: data for name, data in files.items() if name.endswith(".safetensors")}


def key(server):
    return {"X-API-Key": server.api_key}


def promised(answer):
    status, promise = answer
    assert status == 200, promise
    return promise["request_id"]


def poll(server, request_id):
    """The result's bytes, once it is there."""
    headers = key(server) | {"Content-Type": "application/json"}
    body = json.dumps({"request_id": request_id}).encode()
    url = f"{server.base_url}/api/v1/retrieve_future"
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code != 408:
                raise


def failure(server, request_id):
    failed = json.loads(poll(server, request_id))
    assert failed["category"] == "user", failed
    return failed["error"]


def tensor(name, values, dtype="<f4", shape=None):
    """Puts an input into the datum."""
    array = np.array(values, dtype)

    def change(_, datum):
        put = datum.loss_fn_inputs[name]
        put.Clear()
        put.dtype = {"<f4": pb.DTYPE_FLOAT32, "<i8": pb.DTYPE_INT64}[dtype]
        put.dense = array.tobytes()
        put.shape.extend(array.shape if shape is None else shape)

    return change


def tokens(*ids):
    def change(_, datum):
        datum.model_input[0].encoded_text.tokens = np.array(ids, "<i4").tobytes()

    return change


def loss(name, **config):
    def change(request, _):
        request.loss_fn = name
        request.loss_fn_config.update(config)

    return change


def no_data(request, _):
    del request.data[:]


def no_targets(_, datum):
    del datum.loss_fn_inputs["target_tokens"]


def wrapping_rows(_, datum):
    """Differences of these row bounds are small and positive when 64 bits wrap around."""
    put = datum.loss_fn_inputs["target_tokens"]
    put.Clear()
    put.dtype = pb.DTYPE_INT64
    put.shape.extend([4, 1])
    bounds = np.array([0, 2**63 - 1, -(2**63), -1, 0], "<i8")
    put.sparse_csr.crow_indices = bounds.tobytes()


ONES = [1.0] * 8
TRAINING = [
    (tensor("weights", [1, NAN, *ONES[2:]]), "data[1].loss_fn_inputs['weights'][1]: nan is not"),
    (tensor("weights", [*ONES[:7], -INF]), "data[1].loss_fn_inputs['weights'][7]: -inf is not"),
    (tensor("weights", ONES[:5]), "data[1].loss_fn_inputs['weights']: shape [5] does not match"),
    (tensor("weights", ONES, shape=[9]), "32 bytes do not fit shape [9] of float32"),
    (tensor("weights", [1] * 8, "<i8"), "dtype is int64; use float32"),
    (tensor("target_tokens", range(7), "<i8"), "['target_tokens']: shape [7] does not match the 8"),
    (tensor("target_tokens", [1] * 7 + [-1], "<i8"), "['target_tokens'][7]: token id -1 is not in"),
    (tensor("nobody_knows", ONES), "['nobody_knows']: cross_entropy does not take it; it takes"),
    (tokens(5, 6, 7, 8, 9, 10, 11, 10**6), "data[1].model_input[7]: token id 1000000 is not in"),
    (tokens(), "data[1].model_input: it has 0 tokens; send at least 1"),
    (tokens(*[5] * 5000), "more than the context window of"),
    (no_data, "data: there are 0 datums; send at least 1"),
    (no_targets, "data[1].loss_fn_inputs['target_tokens']: missing"),
    (wrapping_rows, "crow_indices do not rise from 0"),
    (loss("no_such_loss"), "loss_fn: 'no_such_loss' is not available on this server; use"),
    (loss("cross_entropy", no_such_key=1.0), "no_such_key"),
    (loss("ppo", clip_low_threshold=NAN), "clip_low_threshold"),
    (loss("custom"), "loss_fn"),
]
STEPS = [
    ({"learning_rate": -1.0}, "adam_params.learning_rate: -1.0 is not a finite number from 0"),
    ({"learning_rate": 1e300}, "learning_rate: 1e+300 is out of range; use 0 to 10000"),
    ({"learning_rate": "high"}, "$.adam_params.learning_rate"),
    ({"beta1": 1.0}, "adam_params.beta1: 1.0 is not from 0 and below 1"),
    ({"eps": 1e-300}, "eps: 1e-300 is out of range; use 1e-37 to 1"),
    ({"weight_decay": 1e9}, "weight_decay: 1e+09 times learning_rate 0.01 is more than 1"),
    ({"grad_clip_norm": -2}, "adam_params.grad_clip_norm: -2.0 is not a finite number from 0"),
]
OTHERS = [
    ("optim_step", {}, "adam_params: missing"),
    ("save_weights", {"path": "../up"}, "'../up' cannot name a checkpoint"),
    ("save_weights", {"path": "x" * 999}, "cannot name a checkpoint; use 1 to 128"),
    ("save_weights", {"path": "a", "ttl_seconds": 5}, "ttl_seconds: 5 is outside 3600"),
    ("save_weights", {"path": "a", "user_metadata": {"k": "v" * 70_000}}, "limit of 65536"),
    ("save_weights_for_sampler", {}, "path, sampling_session_seq_id: exactly one is needed"),
    ("save_weights_for_sampler", {"path": "a\0"}, "'a\\x00' cannot name a checkpoint"),
    ("load_weights", {"path": "x"}, "path: 'x' is not a checkpoint path"),
    ("load_weights", {"path": "tinker://me/sampler_weights/x"}, "is not a checkpoint path"),
]


def hostile_requests(run):
    """(promise, what its error must say) of everything that is wrong with a run in progress."""
    yield from ((run.train(change), said) for change, said in TRAINING)
    yield from ((run.step(**params), said) for params, said in STEPS)
    yield from ((run.ask(path, **body), said) for path, body, said in OTHERS)


def test_wrong_requests_fail_clearly_and_leave_a_run_as_if_they_had_not_been_sent(server, client):
    harassed, left_alone = (Run(server, new_model(client, seed=3).model_id) for _ in range(2))
    asked = {}
    for run in (harassed, left_alone):
        run.train(start=5)
        asked[run] = list(hostile_requests(run)) if run is harassed else []
        run.train(start=40)
        poll(server, run.step())
    failures = [(failure(server, promise), said) for promise, said in asked[harassed]]

    assert [(error, said) for error, said in failures if said not in error] == []
    assert harassed.logprobs() == left_alone.logprobs()
    assert harassed.saved() == left_alone.saved()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"base_model": "no/such"}, "'no/such' is not served for training; served are"),
        ({"base_model": MODEL + ":" + "x" * 9999}, "is not served for training"),
        ({"lora_config": {"rank": 3}}, "lora_config.rank: 3 is not a power of two from 1 to"),
        ({"lora_config": {"rank": 2**40}}, "lora_config.rank: 1099511627776 is not a power"),
        ({"lora_config": {"rank": -8}}, "lora_config.rank: -8 is not"),
        ({"lora_config": {"rank": "8"}}, "$.lora_config.rank"),
        ({"model_seq_id": -1}, "$.model_seq_id"),
        ({"user_metadata": {"k": 1}}, "$.user_metadata"),
        ({"optimizer_config": {"type": "sgd"}}, "optimizer_config.type: 'sgd'"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_name(server, wrong, said):
    _, session = server.post("create_session", {"sdk_version": "0.38.0"})
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": MODEL}
    body |= {"lora_config": {"rank": 8}}
    status, answer = server.post("create_model", body | wrong)

    assert (status, said in answer["detail"]) == (400, True), answer
    assert server.post("create_model", body)[0] == 200


SAMPLES = [
    ({"prompt": {"chunks": []}}, "prompt: has no tokens; send at least one"),
    (
        {"prompt": {"chunks": [{"tokens": [5, 6, 10**6]}]}},
        "prompt[2]: token 1000000 is outside 0 to",
    ),
    ({"prompt": {"chunks": [{"tokens": [5, -1]}]}}, "prompt[1]: token -1 is outside 0 to"),
    ({"prompt": {"chunks": [{"tokens": [5] * 5000}]}}, "tokens are over the model's context of"),
    ({"num_samples": 0}, "num_samples: 0 is outside 1 to"),
    ({"num_samples": 10**9}, "num_samples: 1000000000 is outside 1 to"),
    ({"seq_id": -1}, "$.seq_id"),
    ({"sampling_params": {"temperature": -1}}, "temperature: -1.0 is not a finite number from 0"),
    ({"sampling_params": {"top_p": 0}}, "top_p: 0.0 is not above 0"),
    ({"sampling_params": {"top_k": -7}}, "top_k: -7 is outside 1 to"),
    ({"sampling_params": {"max_tokens": -1}}, "max_tokens: -1 is outside 1 to"),
    ({"sampling_params": {"stop": ["x", 1]}}, "stop: mixes strings and token ids"),
    ({"sampling_params": {"stop": [""]}}, "stop: the empty string"),
    ({"sampling_params": {"stop": ["x" * 2000]}}, "stop: over"),
    ({"sampling_params": {"max_tokens": 5000}}, "over the context length of"),
    ({"sampling_params": {"stop": [10**6]}}, "stop: token 1000000 is outside the vocabulary of"),
]


def test_wrong_samples_fail_clearly_and_the_next_one_is_drawn(server):
    session = server.post("create_session", {"sdk_version": "0.38.0"})[1]["session_id"]
    opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = server.post("create_sampling_session", opened)[1]["sampling_session_id"]
    good = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 4, "stop": []},
    }
    errors = []
    for seq, (wrong, said) in enumerate(SAMPLES):
        status, answer = server.post("asample", good | {"seq_id": seq} | wrong)
        error = answer["detail"] if status == 400 else failure(server, answer["request_id"])
        errors.append((error, said))
    promise = promised(server.post("asample", good | {"seq_id": len(SAMPLES)}))

    assert [(error, said) for error, said in errors if said not in error] == []
    assert len(pb.SampleResponse.FromString(poll(server, promise)).sequences[0].tokens) == 4 * 4

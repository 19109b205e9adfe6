"""Sampling sessions: cancelled samples, copies of a client, weights that move on."""

from __future__ import annotations

import pickle

import pytest
from tests.integration.management.conftest import until
from tests.integration.steps import new_model, step
from tinker import types as T

pytestmark = pytest.mark.slow

PROMPT = T.ModelInput.from_ints([5, 6, 7])
LONG = T.SamplingParams(max_tokens=1800, stop=[])
SHORT = T.SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture
def base(alice):
    return alice[0].create_sampling_client(base_model="tiny/llama").result()


def test_many_samples_are_waited_for_with_one_poll(base):
    futures = [base.sample(PROMPT, 1, SHORT) for _ in range(40)]

    tokens = {tuple(future.result().sequences[0].tokens) for future in futures}

    assert len(tokens) == 1


def test_a_cancelled_sample_stops_and_fails(managed, alice, base):
    session = base.sample(PROMPT, 1, SHORT)
    session.result()
    sampler_id = alice[1].get_session(_session_id(base)).result().sampler_ids[0]
    running = base.sample(PROMPT, 4, LONG)
    request_id = f"{sampler_id}:1"
    until(lambda: managed.post("retrieve_futures", _target(sampler_id))[0] == 200)
    assert managed.post("cancel_future", {"request_id": request_id})[0] == 200
    status, answer = managed.post("retrieve_future", {"request_id": request_id})

    assert (status, answer["error"]) == (200, "cancelled by its client")
    with pytest.raises(Exception, match="cancelled"):
        running.result()
    assert base.sample(PROMPT, 1, SHORT).result().sequences[0].tokens


def test_a_copy_of_a_client_gets_numbers_of_its_own(base):
    copies = [pickle.loads(pickle.dumps(base)) for _ in range(2)]
    answers = [c.sample(PROMPT, 1, SHORT).result().sequences[0].tokens for c in (base, *copies)]

    assert answers[0] == answers[1] == answers[2]
    assert [copy._cloned_sampler_id for copy in copies] == [1, 2]


def test_inflight_samplers_move_on_together_and_snapshots_stay(alice):
    model = new_model(alice[0])
    kept = model.save_weights_and_get_sampling_client().result()
    first = model.save_weights_and_get_sampling_client(kind="inflight").result()
    before = kept.compute_logprobs(PROMPT).result()
    for _ in range(3):
        step(model, lr=0.1)
    second = model.save_weights_and_get_sampling_client(kind="inflight").result()
    after = second.compute_logprobs(PROMPT).result()

    assert after != before
    until(lambda: first.compute_logprobs(PROMPT).result() == after)
    assert kept.compute_logprobs(PROMPT).result() == before


@pytest.mark.timeout(200)
def test_a_result_can_be_read_again_from_a_gateway_that_was_started_anew(managed, base):
    base.sample(PROMPT, 1, SHORT).result()
    request = {"request_id": f"{base._sampling_session_id}:0", "allow_metadata_only": True}
    before = managed.post("retrieve_future", request)
    old = managed.pids["gateway"]
    managed.kill("gateway")
    until(lambda: managed.pids.get("gateway", old) != old)

    assert until(lambda: _answered(managed, request)) == before
    assert before[1]["status"] == "complete_metadata"


def _answered(server, request):
    import urllib.error

    try:
        return server.post("retrieve_future", request)
    except urllib.error.URLError:
        return None


def _session_id(client):
    return client._sampling_session_id.partition(":")[0]


def _target(sampler_id):
    target = {"type": "sampling_session", "sampling_session_id": sampler_id}
    return {"target": target, "timeout": 0.0}

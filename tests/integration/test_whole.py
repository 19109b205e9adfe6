"""Training all weights, and Dimuon, with the unmodified client through real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.integration.conftest import MODEL, connect, start, stop
from tests.integration.steps import PROBE, X, Y, probe
from tests.integration.test_restarts import until_another
from tinker import RequestFailedError
from tinker import types as T
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WHOLE = f"{MODEL}:full"
PATIENCE_S = 120.0
ADAM, DIMUON = T.AdamParams(learning_rate=1e-3), T.DimuonParams(learning_rate=1e-3)
OPTIMIZERS = {"adamw": T.AdamOptimizerConfig(), "dimuon": T.DimuonOptimizerConfig()}
PARAMS = {"adamw": ADAM, "dimuon": DIMUON}


@pytest.fixture(scope="module")
def whole_server(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("whole")
    running = start(folder, model_folder=model_folder, extra="full = true\n")
    yield running
    stop(running)


@contextmanager
def session(server):
    """A client whose models are released at the end: the trainer holds one at a time."""
    clients = connect(server)
    try:
        yield next(clients)
    finally:
        next(clients, None)


def new_model(client, base=WHOLE, **options):
    return client.create_lora_training_client(base, **options).result()


def train(model, params, steps):
    for _ in range(steps):
        loss = model.forward_backward([X, Y], "cross_entropy")
        model.optim_step(params).result()
        loss.result()


def sampled(sampler):
    """What a sampler makes of the probe's targets."""
    tokens = PROBE.model_input.to_ints()
    targets = [int(one) for one in PROBE.loss_fn_inputs["target_tokens"].data]
    prompt = T.ModelInput.from_ints([*tokens, targets[-1]])
    return np.array(sampler.compute_logprobs(prompt).result()[1:], np.float32)


def test_it_is_listed_and_told_of(whole_server):
    with session(whole_server) as client:
        served = {m.model_name: m for m in client.get_server_capabilities().supported_models}
        model = new_model(client)
        info = model.get_info()
        run = client.create_rest_client().get_training_run(model.model_id).result()

    assert {MODEL, WHOLE} <= served.keys()
    assert (info.model_data.model_name, info.is_lora) == (WHOLE, False)
    assert (run.base_model, run.is_lora, run.lora_rank) == (WHOLE, False, None)


def test_training_lowers_the_loss(whole_server):
    with session(whole_server) as client:
        model = new_model(client, rank=1)
        before = model.forward([X, Y], "cross_entropy").result().metrics["loss:sum"]
        train(model, ADAM, 6)
        after = model.forward([X, Y], "cross_entropy").result().metrics["loss:sum"]

    assert after < 0.6 * before


@pytest.mark.parametrize("family", ["adamw", "dimuon"])
def test_three_steps_live_resumed_and_cold(whole_server, family):
    """Equal to the bit with the optimizer, and without it equal to a fresh one."""
    params, optimizer, found = PARAMS[family], OPTIMIZERS[family], {}
    with session(whole_server) as client:
        live = new_model(client, optimizer=optimizer)
        train(live, params, 3)
        path = live.save_state("mark").result().path
        weights = probe(live)
        train(live, params, 3)
        found["live"] = probe(live)
    with session(whole_server) as client:
        warm = client.create_training_client_from_state_with_optimizer(path).result()
        np.testing.assert_array_equal(probe(warm), weights)
        assert warm.get_info().optimizer_config.type == family
        train(warm, params, 3)
        found["warm"] = probe(warm)
        warm.load_state_with_optimizer(path).result()
        train(warm, params, 3)
        found["loaded"] = probe(warm)
        warm.load_state(path).result()
        train(warm, params, 3)
        found["loaded cold"] = probe(warm)
    with session(whole_server) as client:
        cold = client.create_training_client_from_state(path, optimizer=optimizer).result()
        np.testing.assert_array_equal(probe(cold), weights)
        train(cold, params, 3)
        found["cold"] = probe(cold)

    np.testing.assert_array_equal(found["warm"], found["live"])
    np.testing.assert_array_equal(found["loaded"], found["live"])
    np.testing.assert_array_equal(found["cold"], found["loaded cold"])
    assert not np.array_equal(found["cold"], found["live"])


def test_a_second_model_waits_and_is_told_why(whole_server):
    with session(whole_server) as second:
        with session(whole_server) as first:
            probe(new_model(first))
            waiting = second.create_lora_training_client(WHOLE)
            # The client has asked for it when it knows its number: ids are made of these.
            session_id = second.holder.get_session_id()
            answer = until_told(whole_server, f"{session_id}:train:0:0")
            assert f"every trainer of '{WHOLE}' is full" in answer["queue_state_reason"]
            assert answer["queue_state"] == "paused_capacity"
        train(waiting.result(), ADAM, 1)


def until_told(server, request_id):
    """The answer of a poll that says why its model waits."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status, answer = server.post("retrieve_future", {"request_id": request_id})
        if status == 408 and (answer or {}).get("queue_state_reason"):
            return answer
        assert time.monotonic() < deadline, f"{status}: {answer}"


def test_samplers_give_the_trainers_logprobs(whole_server):
    with session(whole_server) as client:
        model = new_model(client)
        base = probe(model)
        train(model, ADAM, 3)
        named = model.save_weights_for_sampler("one").result().path
        first, wanted = client.create_sampling_client(model_path=named).result(), probe(model)
        assert np.abs(base - wanted).max() > 0.1
        np.testing.assert_allclose(sampled(first), wanted, rtol=0, atol=1e-4)
        train(model, ADAM, 1)
        later = (
            model.save_weights_and_get_sampling_client().result()
        )  # there is room for one of them
        np.testing.assert_allclose(sampled(later), probe(model), rtol=0, atol=1e-4)
        np.testing.assert_allclose(sampled(first), wanted, rtol=0, atol=1e-4)
        untrained = client.create_sampling_client(base_model=WHOLE).result()
        np.testing.assert_allclose(sampled(untrained), base, rtol=0, atol=1e-4)


def test_external_weights_are_a_model_that_transformers_loads(whole_server, tmp_path):
    with session(whole_server) as client:
        model = new_model(client)
        train(model, ADAM, 2)
        path = model.save_weights_external("one").result().path
        urls = client.create_rest_client().get_external_weights_urls(path).result().urls
        for name, url in urls.items():
            with urllib.request.urlopen(url, timeout=60) as answer:
                (tmp_path / name).write_bytes(answer.read())
        wanted = probe(model)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor(PROBE.model_input.to_ints())
    targets = [int(one) for one in PROBE.loss_fn_inputs["target_tokens"].data]
    with torch.no_grad():
        logprobs = loaded(input_ids=ids[None]).logits[0].log_softmax(-1)
    found = logprobs[torch.arange(len(ids)), torch.tensor(targets)].numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_a_draw_names_its_weights_and_can_be_seeded(whole_server):
    with session(whole_server) as client:
        model = new_model(client)
        train(model, ADAM, 1)
        sampler = model.save_weights_and_get_sampling_client().result()
        params = T.SamplingParams(max_tokens=12, seed=3, stop=[])
        prompt = T.ModelInput.from_ints([5, 6, 7])
        drawn = [sampler.sample(prompt, 2, params).result().sequences for _ in range(2)]

    assert [s.tokens for s in drawn[0]] == [s.tokens for s in drawn[1]]


def test_a_killed_trainer_changes_no_bit_and_replay_agrees(tmp_path, model_folder):
    """A state is saved every second step, so that recovery begins from one."""
    extra = "full = true\ntrainer.snapshot_steps = 2\n"
    server = start(tmp_path, model_folder=model_folder, extra=extra)
    try:
        params, optimizer = DIMUON, OPTIMIZERS["dimuon"]
        with session(server) as client:
            spared = new_model(client, optimizer=optimizer)
            train(spared, params, 6)
            wanted = probe(spared)
        with session(server) as client:
            killed = new_model(client, optimizer=optimizer)
            train(killed, params, 3)
            old = server.pids["trainer:full"]
            pending = [
                future
                for _ in range(3)
                for future in (
                    killed.forward_backward([X, Y], "cross_entropy"),
                    killed.optim_step(params),
                )
            ]
            server.kill("trainer:full")
            for future in pending:
                future.result()
            until_another(server, "trainer:full", old)
            found = probe(killed)
            run = killed.model_id
        np.testing.assert_array_equal(found, wanted)
        command = [sys.executable, "-m", "tinsmith", "replay", run]
        command += ["--config", str(tmp_path / "tinsmith.toml")]
        command += ["--data-dir", str(tmp_path / "data")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=os.environ, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        stop(server)


def test_what_cannot_be_trained_whole_is_refused(whole_server, server):
    with (
        session(whole_server) as client,
        pytest.raises(Exception, match=r"lora_config\.train_mlp: false, but"),
    ):
        new_model(client, train_mlp=False)
    with (
        session(server) as plain,
        pytest.raises(Exception, match=f"'{WHOLE}' is not served for training"),
    ):
        new_model(plain)


def test_an_optimizer_is_chosen_once_and_changed_only_by_a_new_model(server):
    with session(server) as client:
        model = new_model(client, MODEL, rank=4, optimizer=OPTIMIZERS["dimuon"])
        assert model.get_info().optimizer_config.type == "dimuon"
        train(model, DIMUON, 2)
        before = probe(model)
        with pytest.raises(RequestFailedError, match=r"AdamParams, but this model.*'dimuon'"):
            model.optim_step(ADAM).result()
        np.testing.assert_array_equal(probe(model), before)
        path = model.save_state("mark").result().path
        other = client.create_training_client_from_state(path).result()
        with pytest.raises(RequestFailedError, match=r"DimuonParams, but this model.*'adamw'"):
            other.optim_step(DIMUON).result()
        with pytest.raises(RequestFailedError, match="the checkpoint is of 'dimuon'"):
            other.load_state_with_optimizer(path).result()
        train(other, ADAM, 1)
        info = client.create_rest_client().get_weights_info_by_tinker_path(path).result()

    assert info.optimizer_config.type == "dimuon"

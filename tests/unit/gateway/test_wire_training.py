"""JSON training requests to op bodies."""

from __future__ import annotations

import json

import pytest

from tinsmith import ids
from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith.messages import ops
from tinsmith_gateway.wire import requests, training

SESSION = "s" * 26  # fixed: it is part of test names
MODEL = ids.model_id(SESSION, 0)


def raw(body):
    return json.dumps(body).encode()


def adam(**fields):
    return training.optim_step(raw({"adam_params": fields}))


def lora(**fields):
    return training.lora_shape(requests.LoraConfig(**fields), max_rank=32, model_id=MODEL)


def test_a_step_arrives_as_recorded(recorded):
    step = training.optim_step(raw(recorded("optim_step_adam")))

    assert step == ops.OptimStep(learning_rate=3e-4, weight_decay=0.01, grad_clip_norm=1.0)


def test_a_step_without_numbers_has_the_defaults_of_the_protocol():
    assert adam() == ops.OptimStep(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"learning_rate": -1e-4}, "adam_params.learning_rate: -0.0001"),
        ({"beta1": 1.0}, "adam_params.beta1: 1.0"),
        ({"beta2": -0.1}, "adam_params.beta2: -0.1"),
        ({"eps": -1.0}, "adam_params.eps"),
        ({"weight_decay": -1.0}, "adam_params.weight_decay"),
        ({"grad_clip_norm": -1.0}, "adam_params.grad_clip_norm"),
        ({"learning_rate": "high"}, r"\$.adam_params.learning_rate"),
    ],
)
def test_a_number_out_of_range_is_named(fields, words):
    with pytest.raises(InvalidRequest, match=words):
        adam(**fields)


@pytest.mark.parametrize("text", ["NaN", "1e999"])
def test_a_number_that_is_none_is_refused(text):
    with pytest.raises(InvalidRequest):
        training.optim_step(b'{"adam_params": {"learning_rate": %s}}' % text.encode())


def test_a_dimuon_step_is_read_as_recorded(recorded):
    step = training.optim_step(raw(recorded("optim_step_dimuon")))

    assert (step.optimizer, step.learning_rate, step.beta1) == ("dimuon", 1e-3, 0.9)
    assert (step.grad_clip_norm, step.weight_decay) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"type": "dimuon"}, "optimizer_params: .*learning_rate"),
        ({"type": "dimuon", "learning_rate": -1}, r"optimizer_params\.learning_rate: -1"),
        ({"type": "dimuon", "learning_rate": 1, "beta1": 1}, r"optimizer_params\.beta1: 1"),
        ({"type": "dimuon", "learning_rate": 1, "beta2": 0.9}, "optimizer_params: .*beta2"),
        ({"type": "dimuon", "learning_rate": "x"}, r"optimizer_params: .*learning_rate"),
        ({"type": "lion", "learning_rate": 1}, "'lion' is not supported; send DimuonParams"),
        ({}, "'None' is not supported"),
    ],
)
def test_a_step_of_another_family_with_wrong_content_is_refused(params, words):
    with pytest.raises((InvalidRequest, NotSupported), match=words):
        training.optim_step(raw({"optimizer_params": params}))


def test_a_clip_norm_below_zero_is_none():
    params = {"type": "dimuon", "learning_rate": 1.0, "grad_clip_norm": -1}

    assert training.optim_step(raw({"optimizer_params": params})).grad_clip_norm == 0.0


def test_a_step_of_two_families_is_refused():
    both = {"optimizer_params": {"type": "dimuon"}, "adam_params": {}}

    with pytest.raises(InvalidRequest, match="both are given"):
        training.optim_step(raw(both))


def test_a_step_without_parameters_is_refused():
    with pytest.raises(InvalidRequest, match="adam_params: missing"):
        training.optim_step(b"{}")


def test_a_checkpoint_is_saved_as_recorded(recorded):
    assert training.save_weights(raw(recorded("save_weights"))) == ops.SaveWeights(
        name="step1", overwrite=True, ttl_s=3600, user_metadata={"k": "v"}
    )


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "x" * 129, "a b"])
def test_a_name_that_cannot_stand_in_a_path_is_refused(name):
    with pytest.raises(InvalidRequest, match="path"):
        training.save_weights(raw({"path": name}))


@pytest.mark.parametrize("ttl", [0, -1, 3599, training.MAX_TTL_S + 1])
def test_a_time_to_live_out_of_range_is_refused(ttl):
    with pytest.raises(InvalidRequest, match="ttl_seconds"):
        training.save_weights(raw({"path": "a", "ttl_seconds": ttl}))


@pytest.mark.parametrize("ttl", [3600, training.MAX_TTL_S, None])
def test_a_time_to_live_in_range_is_taken(ttl):
    assert training.save_weights(raw({"path": "a", "ttl_seconds": ttl})).ttl_s == ttl


def test_named_weights_for_sampling_have_a_name_only(recorded):
    body = training.save_weights_for_sampler(
        raw(recorded("save_weights_for_sampler_named")), SESSION
    )

    assert (body.name, body.sampling_session_id) == ("samp1", None)


@pytest.mark.parametrize("form", ["ephemeral", "inflight"])
def test_unnamed_weights_for_sampling_become_a_session(recorded, form):
    request = recorded(f"save_weights_for_sampler_{form}", sampling_session_seq_id=4)

    body = training.save_weights_for_sampler(raw(request), SESSION)

    assert (body.name, body.sampling_session_id) == (None, f"{SESSION}:sample:4")


@pytest.mark.parametrize("body", [{}, {"path": "a", "sampling_session_seq_id": 1}])
def test_weights_for_sampling_are_either_named_or_a_session(body):
    with pytest.raises(InvalidRequest, match="exactly one"):
        training.save_weights_for_sampler(raw(body), SESSION)


def test_an_adapter_has_the_shape_asked_for():
    assert lora(rank=8, seed=5, train_unembed=False) == ops.LoraShape(
        rank=8, seed=5, train_unembed=False
    )


def test_an_adapter_without_a_seed_gets_the_same_one_when_asked_for_again():
    assert lora() == lora()
    assert lora().seed != training.lora_shape(
        requests.LoraConfig(), max_rank=32, model_id=ids.model_id(SESSION, 1)
    ).seed  # fmt: skip


@pytest.mark.parametrize("rank", [0, -8, 3, 48, 64])
def test_a_rank_that_is_no_power_of_two_in_range_is_refused(rank):
    with pytest.raises(InvalidRequest, match=f"rank: {rank} is not a power of two from 1 to 32"):
        lora(rank=rank)


def test_an_adapter_that_trains_nothing_is_refused():
    with pytest.raises(InvalidRequest, match="nothing to train"):
        lora(train_attn=False, train_mlp=False, train_unembed=False)


def test_without_a_lora_config_both_ways_are_named():
    with pytest.raises(InvalidRequest, match=r"lora_config\.rank, or for all .*':full'"):
        training.lora_shape(None, max_rank=32, model_id="m")


def test_a_model_that_is_trained_whole_has_no_rank_and_leaves_nothing_out():
    config = requests.LoraConfig(rank=7, seed=1)

    assert training.whole_shape(config) == training.whole_shape(None) == ops.WHOLE
    with pytest.raises(InvalidRequest, match=r"lora_config\.train_unembed: false"):
        training.whole_shape(requests.LoraConfig(train_unembed=False))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"{}",
        b'{"model_id":"x","seq_id":1}',
        b'{"model_id":"' + MODEL.encode() + b'","seq_id":0}',
        b'{"model_id":"' + MODEL.encode() + b'","seq_id":true}',
    ],
)
def test_a_body_that_tells_no_place_cannot_be_attributed(body):
    with pytest.raises(InvalidRequest):
        training.sequenced(body)


def test_content_that_is_wrong_becomes_an_op_that_fails():
    body = training.lazily(lambda: training.optim_step(b'{"adam_params": 3}'))

    assert isinstance(body, ops.Refused)
    assert (body.reason.category, "$.adam_params" in body.reason.message) == ("user", True)

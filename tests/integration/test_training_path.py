"""A user's training loop, with the unmodified client, through four real processes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.integration.steps import RANK, X, Y, datum, new_model, probe, step


def test_training_lowers_the_loss(client):
    model = new_model(client)
    losses = [step(model) for _ in range(6)]

    assert losses[-1] < 0.7 * losses[0]


def test_the_loss_is_the_sum_over_tokens_of_what_forward_reports(client):
    model = new_model(client)
    result = model.forward([X, Y], "cross_entropy").result()
    logprobs = np.concatenate([np.array(o["logprobs"].data) for o in result.loss_fn_outputs])

    assert len(logprobs) == 50
    assert result.metrics["loss:sum"] == pytest.approx(-logprobs.sum(), rel=1e-5)


def test_a_forward_pass_adds_no_gradient(client):
    with_forward, without = new_model(client), new_model(client)
    with_forward.forward([Y], "cross_entropy").result()
    for model in (with_forward, without):
        step(model, [X])

    np.testing.assert_array_equal(probe(with_forward), probe(without))


def test_equal_seeds_give_equal_models_and_others_do_not(client):
    models = [new_model(client, seed) for seed in (1, 1, 2)]
    for model in models:
        step(model)
    first, second, other = map(probe, models)

    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


def test_gradients_accumulate_until_the_step(client):
    from tinker import types as T

    apart, together = new_model(client), new_model(client)
    apart.forward_backward([X], "cross_entropy").result()
    apart.forward_backward([Y], "cross_entropy").result()
    together.forward_backward([X, Y], "cross_entropy").result()
    for model in (apart, together):
        model.optim_step(T.AdamParams(learning_rate=1e-2)).result()

    np.testing.assert_allclose(probe(apart), probe(together), atol=1e-5)


def test_a_call_of_many_chunks_keeps_its_order(client):
    """The client sends chunk 2, 3, ... first and chunk 1 last."""
    model = new_model(client)
    data = [datum([n % 50 + 5, n % 31 + 5]) for n in range(2500)]
    result = model.forward(data, "cross_entropy").result()
    last = model.forward(data[-1:], "cross_entropy").result()

    assert len(result.loss_fn_outputs) == 2500
    np.testing.assert_allclose(
        result.loss_fn_outputs[-1]["logprobs"].data,
        last.loss_fn_outputs[0]["logprobs"].data,
        atol=1e-5,
    )


def test_resuming_with_the_optimizer_goes_on_as_if_nothing_had_happened(client):
    live = new_model(client)
    for _ in range(3):
        step(live)
    path = live.save_state("here").result().path
    warm = client.create_training_client_from_state_with_optimizer(path).result()
    cold = client.create_training_client_from_state(path).result()
    before = [probe(m) for m in (live, warm, cold)]
    for model in (live, warm, cold):
        step(model)

    np.testing.assert_array_equal(before[0], before[1])
    np.testing.assert_array_equal(before[0], before[2])
    np.testing.assert_array_equal(probe(live), probe(warm))
    assert not np.array_equal(probe(live), probe(cold))


def test_loading_into_a_running_model_replaces_its_weights(client):
    model = new_model(client)
    step(model)
    saved = probe(model)
    path = model.save_state("mark").result().path
    step(model)
    assert not np.array_equal(probe(model), saved)
    model.load_state(path).result()

    np.testing.assert_array_equal(probe(model), saved)


def test_a_name_in_use_is_refused_and_overwrite_replaces_it(client):
    from tinker import RequestFailedError

    model = new_model(client)
    model.save_state("twice").result()
    with pytest.raises(RequestFailedError, match="overwrite"):
        model.save_state("twice").result()

    assert model.save_state("twice", overwrite=True).result().path.endswith("/weights/twice")


def test_get_info_tells_what_the_model_is(client, model_folder):
    info = new_model(client).get_info()

    assert info.model_data.model_name == "tiny/llama"
    assert info.model_data.tokenizer_id == str(model_folder)
    assert info.lora_rank == RANK


def test_the_client_finds_the_tokenizer(client):
    tokenizer = new_model(client).get_tokenizer()

    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"

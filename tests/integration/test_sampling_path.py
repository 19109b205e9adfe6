"""Sampling with the unmodified client: adapters, seeds, stops, and whose numbers they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.integration.steps import datum, new_model, step
from tinker import types as T

PROMPT = T.ModelInput.from_ints([5, 6, 7, 8])


def sample(sampler, n=1, **params):
    params = {"max_tokens": 8, "seed": 1, **params}
    return sampler.sample(PROMPT, n, T.SamplingParams(**params)).result().sequences


@pytest.fixture
def base(client):
    return client.create_sampling_client(base_model="tiny/llama").result()


def test_a_seed_repeats_itself_and_samples_differ(base):
    first, again = sample(base, 4), sample(base, 4)

    assert [s.tokens for s in first] == [s.tokens for s in again]
    assert len({tuple(s.tokens) for s in first}) == 4


def test_every_token_has_its_logprob(base):
    (drawn,) = sample(base, stop=[], max_tokens=12)

    assert len(drawn.tokens) == len(drawn.logprobs) == 12
    assert drawn.stop_reason == "length"


def test_a_stop_token_ends_the_text_and_is_part_of_it(base):
    (free,) = sample(base, stop=[], max_tokens=12)
    stop = free.tokens[3]
    (stopped,) = sample(base, stop=[stop], max_tokens=12)

    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.stop_reason == "stop"


def test_sampled_logprobs_are_the_trainers(client):
    """Base, trained adapter by path, and the same tokens scored by three ways."""
    model = new_model(client)
    for _ in range(3):
        step(model)
    sampler = model.save_weights_and_get_sampling_client().result()
    (drawn,) = sample(sampler, stop=[], max_tokens=16)
    tokens = [5, 6, 7, 8, *drawn.tokens]
    scored = sampler.compute_logprobs(T.ModelInput.from_ints(tokens)).result()
    trained = model.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]

    np.testing.assert_allclose(drawn.logprobs, scored[4:], atol=1e-4)
    np.testing.assert_allclose(drawn.logprobs, np.array(trained["logprobs"].data)[3:-1], atol=1e-4)


def test_a_named_sampler_keeps_the_weights_it_was_saved_with(client):
    model = new_model(client)
    step(model)
    path = model.save_weights_for_sampler("frozen").result().path
    frozen = client.create_sampling_client(model_path=path).result()
    before = frozen.compute_logprobs(PROMPT).result()
    for _ in range(3):
        step(model)

    assert frozen.compute_logprobs(PROMPT).result() == before
    assert frozen.get_base_model() == "tiny/llama"


def test_adapters_and_the_base_are_served_side_by_side(client, base):
    model = new_model(client)
    for _ in range(4):
        step(model)
    trained = model.save_weights_and_get_sampling_client().result()
    alone = [sample(sampler, temperature=0.0)[0].tokens for sampler in (base, trained)]
    futures = [
        sampler.sample(PROMPT, 1, T.SamplingParams(max_tokens=8, temperature=0.0))
        for sampler in (base, trained) * 4
    ]
    together = [future.result().sequences[0].tokens for future in futures]

    assert together == alone * 4


def test_a_one_token_prompt_has_nothing_to_score(base):
    assert base.compute_logprobs(T.ModelInput.from_ints([5])).result() == [None]


def test_an_ephemeral_sampler_is_not_a_checkpoint(client):
    model = new_model(client)
    model.save_weights_and_get_sampling_client().result()
    model.save_state("listed").result()
    rest = client.create_rest_client()
    listed = rest.list_checkpoints(model.model_id).result().checkpoints

    assert [c.checkpoint_id for c in listed] == ["weights/listed"]


def test_other_tokens_of_a_prompt_are_scored_and_drawn(base):
    """Dense and sparse targets, and draws, against what the client computes by itself."""
    ids = torch.full((3, 20), -1)
    ids[0, 0], ids[1, 0], ids[1, 1], ids[2, 1] = 9, 10, 11, 12
    asked = {"prompt": PROMPT, "num_samples": 1, "sampling_params": T.SamplingParams(max_tokens=1)}
    targets = [T.TensorData.from_torch(ids), T.TensorData.from_torch_sparse(ids, pad_value=-1)]
    dense, sparse = (
        base.sample(**asked, target_prompt_logprobs=one, prompt_alt_tokens_k=3).result()
        for one in targets
    )

    found = dense.target_prompt_logprobs.to_torch()
    assert (found[0, 1], found[2, 0]) == (0, 0)
    assert sparse.target_prompt_logprobs.data == found[ids >= 0].tolist()
    whole = T.ModelInput.from_ints([5, 6, 10])
    assert base.compute_logprobs(whole).result()[2] == pytest.approx(float(found[1, 0]), abs=1e-5)
    drawn = dense.prompt_alt_tokens
    assert list(drawn.tokens.to_torch().shape) == list(drawn.logprobs.to_torch().shape) == [3, 3]

"""Every loss function as a user calls it, with the unmodified client."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import tinker
import torch
from tests.integration.steps import PROBE, RANK, X, Y, datum, new_model, probe, step
from tinker import types as T
from transformers import AutoModelForCausalLM

from tinsmith.messages.ops import LoraShape
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

PROMPT, LENGTH = 6, 20
TOKENS = list(range(5, 5 + LENGTH))
SAMPLED = np.arange(LENGTH) >= PROMPT


def scores(model, *data):
    outputs = model.forward(list(data), "cross_entropy").result().loss_fn_outputs
    return [np.array(o["logprobs"].data, np.float32).reshape(o["logprobs"].shape) for o in outputs]


def rollout(model, advantage=1.0, drift=0.0, **more):
    """A sampled sequence of a policy whose logprobs were lower by ``drift``."""
    targets = [*TOKENS[1:], TOKENS[0]]
    logprobs = (scores(model, datum(TOKENS, targets))[0] - drift) * SAMPLED
    inputs = {
        "target_tokens": np.array(targets),
        "logprobs": logprobs.astype(np.float32),
        "advantages": (advantage * SAMPLED).astype(np.float32),
        **more,
    }
    whole = T.Datum(model_input=T.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)
    spans = [
        T.PromptProvenanceSpan(sequence_id="s", length=PROMPT),
        T.SampledProvenanceSpan(sequence_id="s", length=LENGTH - PROMPT),
    ]
    return whole.with_provenance(spans, spans)


POLICY = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "gspo": {},
    "stable_reinforce": {"kl_coeff": 0.1},
}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("loss", POLICY)
def test_a_policy_loss_makes_tokens_likelier_by_the_sign_of_the_advantage(client, loss, sign):
    model = new_model(client)
    step(model)
    data = [rollout(model, sign)]
    before = scores(model, datum(TOKENS))[0]
    result = model.forward_backward(data, loss, POLICY[loss] or None).result()
    model.optim_step(T.AdamParams(learning_rate=1e-3)).result()

    moved = (scores(model, datum(TOKENS))[0] - before)[SAMPLED].mean()

    assert sign * moved > 0
    (output,) = result.loss_fn_outputs
    np.testing.assert_allclose(output["logprobs"].data, before, atol=1e-6)
    assert result.metrics["dlogp:max"] == pytest.approx(0, abs=1e-5)
    assert result.metrics["compared:sum"] == LENGTH - PROMPT


def test_dro_is_its_formula(client):
    model = new_model(client)
    data = [rollout(model, 0.5, drift=2.0)]
    lp = scores(model, datum(TOKENS))[0].astype(np.float64)
    drift = lp - data[0].loss_fn_inputs["logprobs"].to_numpy()

    result = model.forward(data, "dro", {"beta": 0.2}).result()

    expected = -(lp * 0.5 * SAMPLED - 0.5 * 0.2 * drift**2).sum()
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert result.metrics["kl_k1:mean"] == pytest.approx(-2.0, abs=1e-5)
    assert result.metrics["outside:mean"] == 1.0


def test_figures_of_a_call_of_many_chunks_are_those_of_all_its_datums(client):
    model = new_model(client)
    far, near = rollout(model, drift=2.0), rollout(model)
    data = [far] * 10 + [near] * 1190

    metrics = model.forward(data, "ppo").result().metrics

    assert metrics["compared:sum"] == 1200 * (LENGTH - PROMPT)
    assert metrics["clipped:mean"] == pytest.approx(10 / 1200)
    assert metrics["kl_k1:mean"] == pytest.approx(-2.0 * 10 / 1200, abs=1e-5)
    assert metrics["dlogp:max"] == pytest.approx(2.0, abs=1e-5)


def rows(is_sparse):
    """Three targets per position; as torch tensors the client sends them in sparse form."""
    rng = np.random.default_rng(0)
    targets = rng.integers(1, 50, (LENGTH, 30)) * (np.arange(30) < 3)
    weights = rng.uniform(-1, 1, (LENGTH, 30)).astype(np.float32) * (np.arange(30) < 3)
    inputs = {"target_tokens": targets, "weights": weights}
    if is_sparse:
        inputs = {key: torch.from_numpy(value) for key, value in inputs.items()}
    whole = T.Datum(model_input=T.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)
    parts = [datum(TOKENS, targets[:, k], weights[:, k]) for k in range(3)]
    return whole, parts


@pytest.mark.parametrize("is_sparse", [False, True])
def test_several_targets_per_position_are_the_sum_of_one_target_each(client, is_sparse):
    wide, narrow = new_model(client), new_model(client)
    whole, parts = rows(is_sparse)
    assert (whole.loss_fn_inputs["weights"].sparse_crow_indices is not None) == is_sparse
    results = [
        model.forward_backward(data, "cross_entropy").result()
        for model, data in ((wide, [X, whole]), (narrow, [X, *parts]))
    ]
    norms = [
        model.optim_step(T.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"]
        for model in (wide, narrow)
    ]

    losses = [result.metrics["loss:sum"] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    found = results[0].loss_fn_outputs[1]["logprobs"]
    assert list(found.shape) == [LENGTH, 30]
    columns = [np.array(o["logprobs"].data) for o in results[1].loss_fn_outputs[1:]]
    np.testing.assert_allclose(
        np.array(found.data).reshape(LENGTH, 30)[:, :3], np.stack(columns, axis=1), atol=1e-5
    )


def preference(logprobs):
    """A loss as DPO's: of whole sequences, and nonlinear."""
    first, second = (lp.sum() for lp in logprobs)
    return -torch.nn.functional.logsigmoid(0.1 * (first - second + 20.0))


def reference_gradients(model_folder, folder):
    """Autograd's gradients of that loss at the adapter that every new model starts with."""
    engine = TrainingEngine(base_model.load(str(model_folder), name="tiny/llama"))
    engine.create("m", LoraShape(rank=RANK, seed=0))
    for file, content in to_files(engine.snapshot("m"), with_optimizer=False).items():
        (folder / file).write_bytes(content)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    trainable = [p for p in model.parameters() if p.requires_grad]

    def logprobs(sent):
        tokens = torch.tensor(sent.model_input.to_ints())
        targets = torch.tensor(sent.loss_fn_inputs["target_tokens"].data)
        lp = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        return lp.gather(1, targets[:, None]).squeeze(1)

    loss = preference([logprobs(X), logprobs(Y)])
    loss.backward()
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0)
    norm = torch.nn.utils.clip_grad_norm_(trainable, torch.inf)
    optimizer.step()
    return loss.item(), norm.item(), logprobs(PROBE).detach().numpy()


def test_a_client_side_custom_loss_trains_by_autograds_gradient(client, model_folder, tmp_path):
    model = new_model(client)
    result = model.forward_backward_custom(
        [X, Y], lambda data, logprobs: (preference(logprobs), {"margin": 1.5})
    ).result()
    stepped = model.optim_step(T.AdamParams(learning_rate=1e-2, eps=0.1)).result()
    loss, norm, after = reference_gradients(model_folder, tmp_path)

    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert result.metrics["margin"] == 1.5
    assert "surrogate_loss:sum" in result.metrics
    assert stepped.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    np.testing.assert_allclose(probe(model), after, atol=1e-4)


def weighted(logprobs, weights):
    loss = -(weights * logprobs).sum()
    return loss, {"custom/longest:sum": loss, "custom/first:mean": logprobs[0]}


def test_a_loss_that_the_server_runs_trains_as_the_built_in_one_does(client):
    model, spared = new_model(client), new_model(client)
    ranks = {"logprobs": 1, "weights": 1}
    handle = client.create_custom_loss(weighted, input_ranks=ranks).result()
    result = model.forward_backward_custom([X, Y], handle).result()
    expected = spared.forward_backward([X, Y], "cross_entropy").result()
    for each in (model, spared):
        each.optim_step(T.AdamParams(learning_rate=1e-2, eps=0.1)).result()

    assert handle.loss_id is not None
    assert "surrogate_loss:sum" not in result.metrics
    assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    firsts = [output["logprobs"].data[0] for output in expected.loss_fn_outputs]
    assert result.metrics["custom/first:mean"] == pytest.approx(np.mean(firsts), rel=1e-6)
    np.testing.assert_allclose(probe(model), probe(spared), atol=1e-6)


def test_a_loss_that_the_server_cannot_run_is_refused_with_what_it_can(client):
    def ranked(logprobs):
        return torch.sort(logprobs)[0].sum(), {}

    with pytest.raises(tinker.BadRequestError, match=r"'torch.sort' is not allowed; allowed are"):
        client.create_custom_loss(ranked, input_ranks={"logprobs": 1}).result()


def failing(model, data, loss, config=None):
    with pytest.raises(tinker.RequestFailedError) as error:
        model.forward_backward(data, loss, config).result()
    return str(error.value)


def test_what_is_wrong_is_named_and_leaves_the_gradient_alone(client):
    model, spared = new_model(client), new_model(client)
    good = rollout(model)
    nan = rollout(model, advantages=np.array([np.nan] * LENGTH, np.float32))
    short = rollout(model, advantages=np.ones(3, np.float32))
    model.forward_backward([good], "ppo").result()

    assert "data[1].loss_fn_inputs['advantages'][0]: nan" in failing(model, [good, nan], "ppo")
    assert "shape [3] does not match the 20 tokens" in failing(model, [short], "cispo")
    assert "it takes clip_high_threshold" in failing(model, [good], "ppo", {"epsilon": 0.2})
    assert "use cispo, cross_entropy, custom, dro" in failing(model, [good], "grpo")
    assert "1 is not a text" in failing(model, [good], "stable_reinforce", {"mode": 1.0})

    spared.forward_backward([good], "ppo").result()
    for each in (model, spared):
        each.optim_step(T.AdamParams(learning_rate=1e-2)).result()
    np.testing.assert_array_equal(probe(model), probe(spared))


def test_without_provenance_the_inputs_tell_stable_reinforce_what_was_sampled(client):
    model = new_model(client)
    spanned = rollout(model, drift=0.3)
    bare = T.Datum(model_input=spanned.model_input, loss_fn_inputs=dict(spanned.loss_fn_inputs))
    config = {"kl_coeff": 0.1}

    told = model.forward_backward([spanned], "stable_reinforce", config).result()
    inferred = model.forward_backward(
        [bare], "stable_reinforce", {**config, "mode": "text"}
    ).result()

    assert inferred.metrics["compared:sum"] == LENGTH - PROMPT
    figures = {key: value for key, value in told.metrics.items() if not key.startswith("log_")}
    assert figures.items() <= inferred.metrics.items()


def test_a_gradient_that_is_not_finite_fails_its_step_and_no_other(client):
    model, spared = new_model(client), new_model(client)
    step(model)
    step(spared)
    model.forward_backward(
        [datum(TOKENS, weights=np.full(LENGTH, 1e30, np.float32))], "cross_entropy"
    )
    with pytest.raises(tinker.RequestFailedError, match="gradient: its norm is"):
        model.optim_step(T.AdamParams(learning_rate=1e-2)).result()

    np.testing.assert_array_equal(probe(model), probe(spared))
    step(model)
    step(spared)
    np.testing.assert_array_equal(probe(model), probe(spared))

"""Every loss through the engine: gradients of the adapter's weights against autograd's."""

from __future__ import annotations

import msgspec
import numpy as np
import peft
import pytest
import torch
from tests.unit.trainer import policy
from tests.unit.trainer.examples import logprobs, tensor, values
from transformers import AutoModelForCausalLM

from tinsmith.messages.ops import Datum, ForwardBackward, LoraShape, OptimStep, Span
from tinsmith_trainer import base_model, losses
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

pytestmark = [  # what PEFT itself says and calls
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

LENGTHS = (40, 7, 23, 64, 1)
NAMES = sorted(losses.LOSSES)
VOCAB = 400


def inputs_of(name, tokens, rng):
    """What a client sends: a prompt without advantages, and some sampled tokens after it."""
    shape = tokens.shape
    if name == "cross_entropy":
        weights = rng.uniform(-1, 2, shape) * (rng.uniform(size=shape) > 0.3)
        return {"weights": tensor(weights, "float32")}
    is_sampled = np.arange(len(tokens)) >= len(tokens) // 3
    advantages = rng.normal(size=shape) * is_sampled * (rng.uniform(size=shape) > 0.2)
    sent = {"logprobs": (-6 + rng.normal(size=shape)) * is_sampled, "advantages": advantages}
    if name == "gspo":
        sent["sequence_ratio_mask"] = is_sampled
    return {key: tensor(value, "float32") for key, value in sent.items()}


def spans(name, length):
    if name != "stable_reinforce":
        return {}
    start = length // 3
    prompt = Span(kind="prompt", sequence_id="s", length=start)
    sampled = Span(kind="sampled", sequence_id="s", length=length - start)
    return {"input_spans": (prompt, sampled), "target_spans": (prompt, sampled)}


def data_of(name):
    data = []
    for length in LENGTHS:
        rng = np.random.default_rng(length)
        tokens = rng.integers(0, VOCAB, length + 1)
        sent = {"target_tokens": tensor(tokens[1:], "int64"), **inputs_of(name, tokens[1:], rng)}
        tiling = spans(name, length)
        data.append(Datum(tokens=tensor(tokens[:-1], "int32"), inputs=sent, **tiling))
    return tuple(data)


def op(name, *data, **fields):
    return ForwardBackward(data=data, loss_fn=name, **fields)


@pytest.fixture
def model(engine: TrainingEngine) -> str:
    """A model with a step behind it, so that B is not zero."""
    engine.create("m", LoraShape(rank=4))
    engine.forward_backward("m", op("cross_entropy", *data_of("cross_entropy")))
    engine.optim_step("m", OptimStep(learning_rate=3e-3))
    return "m"


def reference_of(engine, folder, checkpoint):
    """PEFT's layers on the same weights in float64."""
    for file, content in to_files(engine.snapshot("m"), with_optimizer=False).items():
        (checkpoint / file).write_bytes(content)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, checkpoint, is_trainable=True)
    return model.double()


def loss_of(reference, name, datum):
    tokens = torch.tensor(values(datum.tokens), dtype=torch.int64)
    lp = reference(input_ids=tokens[None]).logits[0].log_softmax(-1)
    targets = torch.tensor(values(datum.inputs["target_tokens"]))
    lp = lp.gather(1, targets[:, None]).squeeze(1)
    sent = {
        key: torch.tensor(values(value), dtype=torch.float64) for key, value in datum.inputs.items()
    }
    if datum.target_spans:
        sent["sampled"] = (torch.arange(len(tokens)) >= len(tokens) // 3).double()
    return lp, policy.LOSSES[name](lp, sent)


def gradients_of(engine, reference):
    """Ours and theirs of every factor, in the same order."""
    theirs, named = [], dict(reference.named_parameters())
    views = engine._adapters.get("m").layout.views(engine._adapters.get("m").gradient)
    ours = []
    for target, pair in views.items():
        for letter, grad in zip("AB", pair, strict=True):
            ours.append(grad.double())
            theirs.append(named[f"base_model.model.{target}.lora_{letter}.default.weight"].grad)
    return ours, theirs


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_scores_equal_those_of_autograd(engine, model, tiny_llama, tmp_path, name):
    data = data_of(name)
    reference = reference_of(engine, tiny_llama, tmp_path)
    scored = [loss_of(reference, name, datum) for datum in data]
    total = sum(loss for _, loss in scored)
    total.backward()

    done = engine.forward_backward(model, op(name, *data))

    ours, theirs = gradients_of(engine, reference)
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
    assert done.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    for (lp, _), found in zip(scored, logprobs(done), strict=True):
        np.testing.assert_allclose(found, lp.detach(), atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_two_calls_give_the_gradient_of_one(engine, model, name):
    data = data_of(name)
    engine.forward_backward(model, op(name, *data))
    together = engine._adapters.get(model).gradient.clone()
    engine.optim_step(model, OptimStep(learning_rate=0.0))

    engine.forward_backward(model, op(name, *data[2:]))
    engine.forward_backward(model, op(name, *data[:2]))

    apart = engine._adapters.get(model).gradient
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_pure_sums(engine, model, name):
    datum = data_of(name)[0]
    once = engine.forward_backward(model, op(name, datum)).metrics["loss:sum"]
    gradient = engine._adapters.get(model).gradient.clone()
    engine.optim_step(model, OptimStep(learning_rate=0.0))

    three = engine.forward_backward(model, op(name, datum, datum, datum)).metrics["loss:sum"]

    assert three == pytest.approx(3 * once, rel=1e-5)
    tripled = engine._adapters.get(model).gradient
    torch.testing.assert_close(tripled, 3 * gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_results_keep_order_and_shape_and_have_legal_metrics(engine, model, name):
    data = data_of(name)

    done = engine.forward_backward(model, op(name, *data, forward_only=True))

    plain = [
        msgspec.structs.replace(datum, inputs={"target_tokens": datum.inputs["target_tokens"]})
        for datum in data
    ]
    expected = engine.forward_backward(model, op("cross_entropy", *plain, forward_only=True))
    assert done.logprobs == expected.logprobs
    assert [wire.shape for wire in done.logprobs] == [(length,) for length in LENGTHS]
    assert {wire.dtype for wire in done.logprobs} == {"float32"}
    assert all(key.count(":") == 1 for key in done.metrics)
    assert engine._adapters.get(model).gradient is None


def rows(seed, length, width):
    """A datum of ``width`` targets per position, and the ``width`` datums that it stands for."""
    rng = np.random.default_rng(seed)
    tokens = tensor(rng.integers(0, VOCAB, length), "int32")
    targets = rng.integers(0, VOCAB, (length, width))
    weights = rng.uniform(-1, 2, (length, width)) * (rng.uniform(size=(length, width)) > 0.3)

    def datum(columns):
        sent = {
            "target_tokens": tensor(targets[:, columns], "int64"),
            "weights": tensor(weights[:, columns], "float32"),
        }
        return Datum(tokens=tokens, inputs=sent)

    return datum(slice(None)), [datum(column) for column in range(width)]


def test_several_targets_per_position_are_a_sum_over_them(engine, model):
    wide, single = rows(1, 30, 4)
    done = engine.forward_backward(model, op("cross_entropy", wide))
    together = engine._adapters.get(model).gradient.clone()
    engine.optim_step(model, OptimStep(learning_rate=0.0))

    parts = engine.forward_backward(model, op("cross_entropy", *single))

    assert done.metrics["loss:sum"] == pytest.approx(parts.metrics["loss:sum"], rel=1e-5)
    apart = engine._adapters.get(model).gradient
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-4)
    (found,) = logprobs(done)
    assert found.shape == (30, 4)
    np.testing.assert_allclose(found, np.stack(logprobs(parts), axis=1), atol=1e-5)


def test_datums_of_different_widths_share_a_pass(tiny_llama):
    engine = TrainingEngine(base_model.load(str(tiny_llama), name="tiny"), microbatch_tokens=4096)
    engine.create("m", LoraShape(rank=4))
    data = [rows(1, 20, 4)[0], *rows(2, 20, 1)[1], rows(3, 19, 2)[0]]

    done = engine.forward_backward("m", op("cross_entropy", *data))
    together = engine._adapters.get("m").gradient.clone()
    engine.optim_step("m", OptimStep(learning_rate=0.0))
    alone = [engine.forward_backward("m", op("cross_entropy", datum)) for datum in data]

    assert [wire.shape for wire in done.logprobs] == [(20, 4), (20,), (19, 2)]
    assert done.metrics["loss:sum"] == pytest.approx(sum(d.metrics["loss:sum"] for d in alone))
    torch.testing.assert_close(engine._adapters.get("m").gradient, together, rtol=1e-4, atol=1e-4)
    for found, expected in zip(logprobs(done), alone, strict=True):
        np.testing.assert_allclose(found, logprobs(expected)[0], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cross_entropy"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_token_gets_likelier_by_the_sign_of_its_advantage(engine, model, name, sign):
    datum = data_of(name)[3]
    before = logprobs(engine.forward_backward(model, op(name, datum, forward_only=True)))[0]
    own = {
        "logprobs": tensor(before * (np.arange(64) >= 21), "float32"),
        "advantages": tensor(sign * (np.arange(64) >= 21), "float32"),
    }
    datum = msgspec.structs.replace(datum, inputs=datum.inputs | own)
    engine.forward_backward(
        model, op(name, datum, loss_config={"beta": 0.0} if name == "dro" else {})
    )
    engine.optim_step(model, OptimStep(learning_rate=1e-3))

    after = logprobs(engine.forward_backward(model, op(name, datum, forward_only=True)))[0]

    assert sign * (after - before)[21:].mean() > 0.01

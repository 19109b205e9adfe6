"""The engine's semantics: pure sums, nothing half done, no neighbour felt."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.unit.trainer.examples import cross_entropy, datum, logprobs, random_datum, values
from transformers import AutoModelForCausalLM

from tinsmith.errors import InvalidRequest, NotFound, NotSupported, UnusableGradient
from tinsmith.messages.ops import ForwardBackward, LoraShape, OptimStep
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from pathlib import Path

    from tinsmith.messages.ops import Datum

X, Y = random_datum(20, seed=1), random_datum(33, seed=2)
PROBE = random_datum(16, seed=3)
STEP = OptimStep(learning_rate=1e-3)


@pytest.fixture
def model(engine: TrainingEngine) -> str:
    """A model with one step behind it, so that B is not zero."""
    engine.create("m", LoraShape(rank=8))
    engine.forward_backward("m", cross_entropy(X, Y))
    engine.optim_step("m", STEP)
    return "m"


def loss(engine: TrainingEngine, *data: Datum) -> float:
    op = cross_entropy(*data, forward_only=True)
    return engine.forward_backward("m", op).metrics["loss:sum"]


def probe(engine: TrainingEngine, model_id: str = "m") -> np.ndarray:
    return logprobs(engine.forward_backward(model_id, cross_entropy(PROBE, forward_only=True)))[0]


def gradient(engine: TrainingEngine) -> torch.Tensor | None:
    return engine._adapters.get("m").gradient


def test_a_fresh_adapter_is_the_base_model(engine: TrainingEngine, tiny_llama: Path):
    engine.create("m", LoraShape())
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    ids = torch.tensor(values(PROBE.tokens), dtype=torch.int64)
    targets = torch.tensor(values(PROBE.inputs["target_tokens"]))
    with torch.no_grad():
        lp = base(input_ids=ids[None]).logits[0].log_softmax(-1)

    np.testing.assert_allclose(probe(engine), lp[torch.arange(16), targets], atol=1e-5)


def test_the_loss_is_the_negative_weighted_sum_of_logprobs(engine: TrainingEngine, model: str):
    done = engine.forward_backward(model, cross_entropy(X, Y))
    terms = [values(x.inputs["weights"]) * lp for x, lp in zip((X, Y), logprobs(done), strict=True)]

    assert done.metrics["loss:sum"] == pytest.approx(-sum(t.sum(dtype=float) for t in terms))
    assert done.metrics["tokens:sum"] == 53


def test_losses_of_datums_add_up(engine: TrainingEngine, model: str):
    assert loss(engine, X, X) == pytest.approx(2 * loss(engine, X), rel=1e-6)
    assert loss(engine, X, Y) == pytest.approx(loss(engine, X) + loss(engine, Y), rel=1e-6)


def test_every_metric_key_has_exactly_one_colon(engine: TrainingEngine, model: str):
    assert all(
        key.count(":") == 1 for key in engine.forward_backward(model, cross_entropy(X)).metrics
    )


def test_results_come_in_the_order_of_the_datums(engine: TrainingEngine, model: str):
    data = [random_datum(length, seed=length) for length in (5, 60, 1, 17, 64)]
    done = engine.forward_backward(model, cross_entropy(*data, forward_only=True))
    alone = [engine.forward_backward(model, cross_entropy(d, forward_only=True)) for d in data]

    for together, (single,) in zip(logprobs(done), map(logprobs, alone), strict=True):
        np.testing.assert_allclose(together, single, atol=1e-5)


def test_padding_changes_nothing_but_float_noise(engine: TrainingEngine, model: str):
    short, long = random_datum(3, seed=5), random_datum(61, seed=6)
    engine.microbatch_tokens = 1000
    engine.forward_backward(model, cross_entropy(short, long))
    together = gradient(engine).clone()
    engine.optim_step(model, OptimStep(learning_rate=0.0))
    engine.microbatch_tokens = 61
    engine.forward_backward(model, cross_entropy(short, long))

    torch.testing.assert_close(gradient(engine), together, rtol=1e-4, atol=1e-4)


def test_gradients_of_calls_add_up(engine: TrainingEngine, model: str):
    engine.forward_backward(model, cross_entropy(X))
    first = gradient(engine).clone()
    engine.forward_backward(model, cross_entropy(Y))
    both = gradient(engine).clone()
    engine.optim_step(model, OptimStep(learning_rate=0.0))
    engine.forward_backward(model, cross_entropy(X, Y))

    assert not torch.allclose(first, both)
    torch.testing.assert_close(gradient(engine), both, rtol=1e-4, atol=1e-4)


def test_the_gradient_is_the_slope_of_the_loss(engine: TrainingEngine, model: str):
    engine.forward_backward(model, cross_entropy(X))
    direction = gradient(engine) / gradient(engine).norm()
    weights = engine._adapters.get(model).weights
    weights.add_(direction, alpha=1e-3)
    up = loss(engine, X)
    weights.sub_(direction, alpha=2e-3)

    slope = (up - loss(engine, X)) / 2e-3
    assert slope == pytest.approx(gradient(engine).norm().item(), rel=1e-2)


def test_forward_only_gives_the_same_bits_and_no_gradient(engine: TrainingEngine, model: str):
    alone = engine.forward_backward(model, cross_entropy(X, Y, forward_only=True))

    assert gradient(engine) is None
    assert alone == engine.forward_backward(model, cross_entropy(X, Y))


def test_zero_weights_give_a_gradient_of_zero(engine: TrainingEngine, model: str):
    engine.forward_backward(model, cross_entropy(datum([5, 6, 7], weights=[0, 0, 0])))

    assert torch.equal(gradient(engine), torch.zeros_like(gradient(engine)))


def test_opposite_weights_cancel(engine: TrainingEngine, model: str):
    engine.forward_backward(model, cross_entropy(datum([5, 6, 7], weights=[1, 1, 1])))
    engine.forward_backward(model, cross_entropy(datum([5, 6, 7], weights=[-1, -1, -1])))

    assert gradient(engine).abs().max() == 0


def test_a_step_spends_the_gradient(engine: TrainingEngine, model: str):
    engine.forward_backward(model, cross_entropy(X))
    engine.optim_step(model, STEP)
    before = probe(engine)

    metrics = engine.optim_step(model, STEP).metrics

    assert metrics == {"grad_norm": 0.0, "optimizer_steps": 2.0}
    assert np.array_equal(before, probe(engine))


def test_training_lowers_the_loss_in_every_shape(engine: TrainingEngine):
    for group in ("attn", "mlp", "unembed"):
        flags = {f"train_{name}": name == group for name in ("attn", "mlp", "unembed")}
        engine.create(group, LoraShape(rank=2, **flags))
        first, *_, last = [_train(engine, group) for _ in range(8)]

        assert last < first - 0.1


def _train(engine: TrainingEngine, model_id: str) -> float:
    done = engine.forward_backward(model_id, cross_entropy(datum(range(3, 30))))
    assert engine.optim_step(model_id, OptimStep(learning_rate=1e-2)).metrics["grad_norm"] > 0
    return done.metrics["loss:sum"]


def test_the_base_never_changes(engine: TrainingEngine, model: str, tiny_llama: Path):
    for _ in range(3):
        _train(engine, model)
    ours = {
        name.replace(".base.", "."): tensor
        for name, tensor in engine._passes._base.model.state_dict().items()
    }
    theirs = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()

    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_tenant_feels_no_neighbour(engine: TrainingEngine, tiny_llama: Path):
    alone = TrainingEngine(base_model.load(str(tiny_llama), name="tiny"), microbatch_tokens=64)
    for each in (engine, alone):
        each.create("m", LoraShape(rank=4, seed=1))
    engine.create("noise", LoraShape(rank=16, seed=2))
    for _ in range(3):
        engine.forward_backward("noise", cross_entropy(*[random_datum(50, seed=9)] * 5))
        results = [each.forward_backward("m", cross_entropy(X, Y)) for each in (engine, alone)]
        engine.optim_step("noise", OptimStep(learning_rate=0.1))
        steps = [each.optim_step("m", STEP) for each in (engine, alone)]

        assert results[0] == results[1]
        assert steps[0] == steps[1]
    files = [to_files(each.snapshot("m"), with_optimizer=True) for each in (engine, alone)]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (cross_entropy(X, datum([1, 2], [3, 10**6])), InvalidRequest),
        (ForwardBackward(data=(X,), loss_fn="grpo"), NotSupported),
        (
            ForwardBackward(data=(X,), loss_fn="cross_entropy", loss_config={"a": 1.0}),
            InvalidRequest,
        ),
        (cross_entropy(X, datum([1, 2], weights=[3e38, 3e38])), InvalidRequest),
    ],
)
def test_a_bad_op_leaves_the_gradient_as_it_was(
    engine: TrainingEngine, model: str, op: ForwardBackward, error: type[Exception]
):
    engine.forward_backward(model, cross_entropy(Y))
    before = gradient(engine).clone()

    with pytest.raises(error):
        engine.forward_backward(model, op)

    assert torch.equal(gradient(engine), before)


def test_a_gradient_that_no_step_can_use_fails_the_step_and_is_dropped(
    engine: TrainingEngine, model: str
):
    adapter = engine._adapters.get(model)
    moments = [adapter.optimizer.exp_avg.clone(), adapter.optimizer.exp_avg_sq.clone()]
    before = probe(engine)
    done = engine.forward_backward(model, cross_entropy(datum([1, 2], weights=[1e20, 1e20])))

    with pytest.raises(UnusableGradient, match=r"gradient: .* over the limit of 1e\+18"):
        engine.optim_step(model, STEP)

    assert np.isfinite(done.metrics["loss:sum"])
    assert np.array_equal(before, probe(engine))
    assert torch.equal(moments[0], adapter.optimizer.exp_avg)
    assert torch.equal(moments[1], adapter.optimizer.exp_avg_sq)
    assert engine.optim_step(model, STEP).metrics == {"grad_norm": 0.0, "optimizer_steps": 1.0}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_poisoned_gradient_takes_the_rest_of_its_step_with_it(
    engine: TrainingEngine, model: str, order: tuple[int, int]
):
    good, poison = cross_entropy(Y), cross_entropy(datum([1, 2], weights=[1e20, 1e20]))
    before = probe(engine)
    for index in order:
        engine.forward_backward(model, (good, poison)[index])

    with pytest.raises(UnusableGradient):
        engine.optim_step(model, STEP)

    assert np.array_equal(before, probe(engine))
    engine.forward_backward(model, good)
    assert engine.optim_step(model, STEP).metrics["optimizer_steps"] == 2.0


def test_a_failure_between_passes_leaves_no_half_gradient(
    engine: TrainingEngine, model: str, monkeypatch: pytest.MonkeyPatch
):
    engine.forward_backward(model, cross_entropy(Y))
    before = gradient(engine).clone()
    run, passes = engine._passes.run, []

    def fails_at_the_second(*args: object, **kwargs: object) -> object:
        passes.append(1)
        if len(passes) == 2:
            raise RuntimeError("out of memory")
        return run(*args, **kwargs)

    monkeypatch.setattr(engine._passes, "run", fails_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward_backward(model, cross_entropy(*[random_datum(60, seed=4)] * 3))

    assert torch.equal(gradient(engine), before)
    assert all(pair.A_RI.grad is None for pair in engine._adapters.get(model).pairs.values())


def test_a_diverged_model_says_so_and_names_the_datum(engine: TrainingEngine, model: str):
    engine._adapters.get(model).weights.fill_(1e30)

    with pytest.raises(InvalidRequest, match=r"data\[0\]: its loss is not a finite number"):
        engine.forward_backward(model, cross_entropy(X))

    assert gradient(engine) is None


def test_a_bad_step_keeps_gradient_and_weights(engine: TrainingEngine, model: str):
    engine.forward_backward(model, cross_entropy(X))
    before, weights = gradient(engine).clone(), probe(engine)

    with pytest.raises(InvalidRequest, match="learning_rate: -1 is out of range"):
        engine.optim_step(model, OptimStep(learning_rate=-1.0))

    assert torch.equal(gradient(engine), before)
    assert np.array_equal(weights, probe(engine))


@pytest.mark.parametrize("call", ["forward_backward", "optim_step", "snapshot"])
def test_an_unknown_model_is_not_found(engine: TrainingEngine, call: str):
    ops = {"forward_backward": (cross_entropy(X),), "optim_step": (STEP,), "snapshot": ()}

    with pytest.raises(NotFound, match="model_id: 'ghost' is not on this trainer"):
        getattr(engine, call)("ghost", *ops[call])


def test_a_model_is_created_once(engine: TrainingEngine, model: str):
    before = probe(engine)

    with pytest.raises(InvalidRequest, match="model_id: 'm' exists"):
        engine.create("m", LoraShape())

    assert np.array_equal(before, probe(engine))


def test_a_model_of_a_bad_shape_is_not_created(engine: TrainingEngine):
    with pytest.raises(InvalidRequest, match="rank: 48"):
        engine.create("m", LoraShape(rank=48))

    assert engine.models() == ()


def test_a_dropped_model_leaves_nothing_behind(engine: TrainingEngine, model: str):
    engine.forward_backward(model, cross_entropy(X))
    adapter = engine._adapters.get(model)
    left = [weakref.ref(tensor) for tensor in (adapter.weights, adapter.gradient)]
    del adapter

    engine.drop(model)
    engine.drop(model)
    gc.collect()

    assert engine.models() == ()
    assert [reference() for reference in left] == [None, None]


def test_in_bfloat16_training_works_and_scores_stay_close(engine: TrainingEngine, tiny_llama: Path):
    half = TrainingEngine(base_model.load(str(tiny_llama), name="tiny", dtype="bfloat16"))
    for each in (engine, half):
        each.create("m", LoraShape(rank=8))
    losses = [(_train(engine, "m"), _train(half, "m")) for _ in range(8)]

    assert losses[-1][1] < losses[0][1] - 1
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=0.02)

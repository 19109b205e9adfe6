"""Passes with rows of several models: each model as if it were alone, and again bit for bit."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import numpy as np
import pytest
import torch
from tests.unit.trainer.examples import random_datum, tensor
from tests.unit.trainer.test_isolation import policy_datum

from tinsmith.errors import InvalidRequest, UserError
from tinsmith.messages.ops import Datum, ForwardBackward, Frame, LoraShape, OptimStep
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.compute import Compute
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.parts import Past
from tinsmith_trainer.state import digest

SHAPES = {
    "a": LoraShape(rank=1, seed=1),
    "b": LoraShape(rank=8, seed=2, train_unembed=False),
    "c": LoraShape(rank=32, seed=3, train_mlp=False),
    "d": LoraShape(rank=4, seed=4, train_attn=False, alpha=8),
}
OPS = {
    "a": ForwardBackward(
        data=tuple(random_datum(n, seed=n) for n in (9, 30, 41)), loss_fn="cross_entropy"
    ),
    "b": ForwardBackward(data=(policy_datum(17, 1), policy_datum(50, 2)), loss_fn="ppo"),
    "c": ForwardBackward(data=(policy_datum(64, 3),), loss_fn="gspo"),
    "d": ForwardBackward(data=(policy_datum(5, 4),), loss_fn="importance_sampling"),
}
STEP = OptimStep(learning_rate=1e-2)
FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma2")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_model.build(tmp_path_factory.mktemp("mixing") / "m", family=request.param)


def several(folder, **form):
    """An engine with a model of each of SHAPES, trained for a step."""
    base = base_model.load(str(folder), name="tiny", **form)
    engine = TrainingEngine(base, microbatch_tokens=512)
    for model_id, shape in SHAPES.items():
        engine.create(model_id, shape)
        engine.forward_backward(model_id, OPS["d"])  # so that no B is zero
        engine.optim_step(model_id, STEP)
    return engine


@pytest.fixture
def fresh(folder):
    return lambda: several(folder)


def together(engine, ops):
    """What ``ops`` by model come to, each of one pass, in one pass of them all."""
    running = {model_id: engine.passes(model_id, op) for model_id, op in ops.items()}
    parts = {model_id: next(passes) for model_id, passes in running.items()}
    assert engine.can_join([*parts.values()])
    done = {}
    for model_id, outcome in zip(parts, engine.together([*parts.values()]), strict=True):
        try:
            if isinstance(outcome, Exception):
                running[model_id].throw(outcome)
            running[model_id].send(outcome)
        except StopIteration as end:
            done[model_id] = end.value
        except UserError as error:
            done[model_id] = error
    return done


def gradient(engine, model_id):
    return engine._adapters.get(model_id).gradient


def scores(done):
    return [np.frombuffer(row.data, "<f4") for row in done.logprobs]


def test_a_shared_pass_computes_what_each_model_computes_alone(fresh):
    mixed, alone = fresh(), fresh()
    found = together(mixed, OPS)

    for model_id, op in OPS.items():
        expected = alone.forward_backward(model_id, op)
        for ours, theirs in zip(scores(found[model_id]), scores(expected), strict=True):
            # Beside 1e-6, what float32 rounds off a number of this size.
            np.testing.assert_allclose(ours, theirs, rtol=5e-7, atol=1e-6)
        assert found[model_id].metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
        ours, theirs = gradient(mixed, model_id), gradient(alone, model_id)
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-6
        assert found[model_id].frames[0].rows == 7


def test_with_its_frame_an_op_has_the_same_bits_without_the_others(fresh):
    mixed, again = fresh(), fresh()
    found = together(mixed, OPS)

    for model_id, op in OPS.items():
        repeated = again.forward_backward(model_id, op, Past.of(found[model_id]))

        assert repeated == found[model_id]
        assert torch.equal(gradient(again, model_id), gradient(mixed, model_id))
        assert mixed.optim_step(model_id, STEP) == again.optim_step(model_id, STEP)
        assert digest(mixed.state(model_id)) == digest(again.state(model_id))


def poisoned():
    bad = policy_datum(50, 2)
    huge = {**bad.inputs, "advantages": tensor([1e38] * 50, "float32")}
    data = Datum(tokens=bad.tokens, inputs=huge)
    return ForwardBackward(data=(policy_datum(17, 1), data), loss_fn="importance_sampling")


@pytest.mark.parametrize("kind", ["diverged", "huge advantages"])
def test_a_bad_neighbour_changes_no_bit_of_the_others(fresh, kind):
    mixed, calm = fresh(), fresh()
    ops = OPS
    if kind == "diverged":
        mixed._adapters.get("b").weights.fill_(1e30)
    else:
        ops = {**OPS, "b": poisoned()}
    found, expected = together(mixed, ops), together(calm, OPS)

    if kind == "diverged":
        assert isinstance(found["b"], InvalidRequest)
        assert "data[0]: its loss is not a finite number" in str(found["b"])
        assert gradient(mixed, "b") is None
    for model_id in "acd":
        assert found[model_id] == expected[model_id]
        assert torch.equal(gradient(mixed, model_id), gradient(calm, model_id))


def test_what_a_loss_raises_is_its_own_ops_outcome_alone(fresh, monkeypatch):
    mixed, calm = fresh(), fresh()
    running = {model_id: mixed.passes(model_id, op) for model_id, op in OPS.items()}
    parts = [next(passes) for passes in running.values()]

    def fails(*_: object):
        raise InvalidRequest("loss: no")

    parts[1] = parts[1]._replace(loss=dataclasses.replace(parts[1].loss, terms=fails))
    outcomes = mixed.together(parts)
    expected = together(calm, OPS)

    assert isinstance(outcomes[1], InvalidRequest)
    for passes, outcome, model_id in zip(running.values(), outcomes, OPS, strict=True):
        if model_id == "b":
            continue
        with pytest.raises(StopIteration) as end:
            passes.send(outcome)
        assert end.value.value == expected[model_id]
        assert torch.equal(gradient(mixed, model_id), gradient(calm, model_id))


def test_frames_that_cannot_be_are_refused(engine):
    engine.create("m", LoraShape(rank=1))
    op = ForwardBackward(data=(random_datum(9, seed=1),), loss_fn="cross_entropy")
    for frame in (
        Frame(rows=1, first=1, length=9),
        Frame(rows=2, first=0, length=8),
        Frame(rows=1_000_000, first=0, length=9),
        Frame(rows=2, first=-1, length=9),
    ):
        with pytest.raises(InvalidRequest, match="cannot be those of this request"):
            engine.forward_backward("m", op, Past(frames=(frame,)))


def joined(engine, a, b):
    return engine.can_join([next(engine.passes(*a)), next(engine.passes(*b))])


def test_passes_are_shared_within_the_budget_by_rows_of_similar_length(engine):
    for model_id in "ab":
        engine.create(model_id, LoraShape(rank=1))

    def op(*lengths, **options):
        data = tuple(random_datum(n, seed=n) for n in lengths)
        return ForwardBackward(data=data, loss_fn="cross_entropy", **options)

    assert joined(engine, ("a", op(20)), ("b", op(30)))  # 64 tokens in all
    assert not joined(engine, ("a", op(20, 20)), ("b", op(30)))  # padded to more
    assert not joined(engine, ("a", op(2)), ("b", op(2, forward_only=True)))


async def test_what_waits_together_is_computed_together(engine):
    """The gate is what the thread does while the others arrive."""
    release = threading.Event()
    compute = Compute(engine)
    serving = asyncio.create_task(compute.serve())
    for model_id in "abc":
        engine.create(model_id, LoraShape(rank=1, seed=ord(model_id)))
    lengths = {"a": 9, "b": 12, "c": 10}
    ops = {
        model_id: ForwardBackward(data=(random_datum(n, seed=n),), loss_fn="cross_entropy")
        for model_id, n in lengths.items()
    }
    gate = asyncio.create_task(compute.run("gate", lambda: release.wait(60)))
    running = [
        asyncio.create_task(compute.run_passes(model_id, engine.passes(model_id, op)))
        for model_id, op in ops.items()
    ]
    await asyncio.sleep(0)
    release.set()
    done = await asyncio.gather(*running)
    await gate
    serving.cancel()
    compute.close()

    assert [one.frames for one in done] == [
        (Frame(rows=3, first=first, length=12),) for first in range(3)
    ]

"""Losses that clients define: traced by the real client, carried out here, within bounds."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.unit.trainer.examples import random_datum, tensor

from tinsmith import loss_graphs
from tinsmith.errors import InvalidRequest
from tinsmith.loss_graphs import Graph, Input, LossGraph, Node
from tinsmith.messages.ops import Datum, ForwardBackward, LoraShape, OptimStep
from tinsmith_trainer import custom_loss, graph_operations

pytest.importorskip("tinker")
N = 12


def traced(function, **ranks):
    """The graph as the client uploads it."""
    from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

    handle = trace_loss(function, ranks, "session")
    inputs = [Input(name=each.name, rank=each.rank) for each in handle.inputs]
    graph = msgspec.convert(encode_graph(handle).model_dump(), Graph)
    return LossGraph(name=handle.name, inputs=inputs, graph=graph)


def found(loss: LossGraph):
    return custom_loss.from_config({"loss_id": loss_graphs.loss_id(loss)})


def neg_ll(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss, "custom/first:mean": logprobs[0]}


def clipped(logprobs, q, advantages):
    ratio = torch.exp(logprobs - q)
    gain = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    far = torch.where((ratio - 1).abs() > 0.2, 1.0, 0.0).mean()
    return -gain.sum() / logprobs.shape[0] * 2, {"custom/far:mean": far}


def sequence(logprobs, q, advantages):
    ratio = torch.exp((logprobs - q)[1:].mean())
    entropy = torch.logsumexp(logprobs, dim=0) + torch.cumsum(logprobs, 0).max()
    penalty = torch.nn.functional.softplus(entropy) + logprobs.detach().sum() ** 2
    return -(ratio * advantages).sum() + 0.1 * penalty, {}


def margin(logprobs, beta):
    gap = logprobs[..., :3].sum() - logprobs[3:].sum()
    return -torch.nn.functional.logsigmoid(beta * gap), {"custom/gap:mean": gap}


def targets(logprobs, weights):
    soft = torch.softmax(weights, dim=-1)
    best = torch.amax(logprobs, dim=1, keepdim=True).squeeze(1)
    return -(soft * logprobs).sum() - best.mean(), {}


def case(rows=()):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    shape = (N, *rows)
    return {
        "logprobs": -random(*shape).abs(),
        "weights": random(*shape),
        "q": -random(N).abs(),
        "advantages": random(N),
        "beta": torch.tensor(0.3),
    }


@pytest.mark.parametrize(
    ("function", "ranks", "rows"),
    [
        (neg_ll, {"logprobs": 1, "weights": 1}, ()),
        (clipped, {"logprobs": 1, "q": 1, "advantages": 1}, ()),
        (sequence, {"logprobs": 1, "q": 1, "advantages": 1}, ()),
        (margin, {"logprobs": 1, "beta": 0}, ()),
        (targets, {"logprobs": 2, "weights": 2}, (4,)),
    ],
)
def test_a_graph_has_the_loss_the_metrics_and_the_gradient_of_the_function(function, ranks, rows):
    sent = {key: value for key, value in case(rows).items() if key in ranks}
    lp = sent.pop("logprobs").requires_grad_()
    expected, metrics = function(lp, **sent)
    (slope,) = torch.autograd.grad(expected, lp)

    loss = found(traced(function, **ranks))
    made = loss.prepare(lp.detach(), sent)
    terms = loss.terms(lp.detach(), made, {})

    torch.testing.assert_close(terms.value.sum(), expected.detach())
    torch.testing.assert_close(terms.slope, slope)
    assert loss.measure(lp.detach(), sent) == pytest.approx(
        {key: value.item() for key, value in metrics.items()}
    )


def test_every_allowed_operation_is_there_and_no_other():
    assert set(graph_operations.OPERATIONS) == loss_graphs.OPERATIONS


def test_the_guide_names_every_allowed_operation():
    text = (Path(__file__).parents[3] / "docs" / "losses.md").read_text()
    listed = text.partition("Allowed are `")[2].partition("`")[0]

    assert set(listed.split()) == loss_graphs.OPERATIONS


def graph_of(*nodes, result="x", inputs=()):
    """A loss whose nodes are (target, args); the last one's sum is returned."""
    made = [Node(op="placeholder", name=name, target=name) for name in ("logprobs", *inputs)]
    for index, (target, *args) in enumerate(nodes):
        op = "call_function" if "." in target else "call_method"
        made.append(Node(op=op, name=f"x{index}", target=target, args=args))
    output = {"tuple": [{"ref": made[-1].name}, {"dict": {}}]}
    made.append(Node(op="output", name="output", target="output", args=[output]))
    declared = [Input(name=name, rank=1) for name in ("logprobs", *inputs)]
    return LossGraph(name="l", inputs=declared, graph=Graph(format=1, nodes=made))


LP, X0, X1, X2 = ({"ref": name} for name in ("logprobs", "x0", "x1", "x2"))
TOTAL = ("sum", X0)

FORBIDDEN = {
    "a function of another module": graph_of(("os.system", "id"), TOTAL),
    "a dunder method": graph_of(("__class__", LP), TOTAL),
    "a loader": graph_of(("torch.load", "file"), TOTAL),
    "an allocation": graph_of(("torch.zeros", [10**9]), TOTAL),
    "an in-place method": graph_of(("add_", LP, 1.0), TOTAL),
    "a copy to the host": graph_of(("tolist", LP), TOTAL),
    "a repetition": graph_of(("repeat", LP, 1 << 30), TOTAL),
    "an expansion": graph_of(("expand", LP, 1 << 30, -1), TOTAL),
    "getattr of the operator module": graph_of(("operator.getattr", LP, "data"), TOTAL),
    "getattr as a method": graph_of(("getattr", LP, "data"), TOTAL),
    "a later node": graph_of(("neg", X1), ("sum", X0)),
    "no output": msgspec.structs.replace(
        graph_of(TOTAL), graph=Graph(format=1, nodes=graph_of(("sum", LP)).graph.nodes[:-1])
    ),
    "an unknown input": msgspec.structs.replace(
        graph_of(("sum", LP)),
        inputs=[Input(name="logprobs", rank=1), Input(name="logprobs", rank=1)],
    ),
    "deep nesting": graph_of(("sum", [[[[[[[[[[[[[[LP]]]]]]]]]]]]]])),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_graph_of_anything_else_is_refused_before_it_has_an_id(name):
    with pytest.raises(InvalidRequest):
        loss_graphs.loss_id(FORBIDDEN[name])


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forged_id_of_such_a_graph_is_refused_too(name, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(loss_graphs, "check", lambda loss: None)
        forged = loss_graphs.loss_id(FORBIDDEN[name])

    with pytest.raises(InvalidRequest):
        custom_loss.from_config({"loss_id": forged})


BAD_RUNS = {
    "an attribute": (graph_of(("builtins.getattr", LP, "__class__"), TOTAL), "is not allowed"),
    "data": (graph_of(("builtins.getattr", LP, "data"), TOTAL), "use shape or ndim"),
    "a long text": (graph_of(("operator.mul", "a", 1 << 40), TOTAL), "a str is no operand"),
    "a long tuple": (
        graph_of(("size", LP), ("operator.mul", X0, 1 << 40)),
        "a tuple is no operand",
    ),
    "a large integer": (graph_of(("operator.mul", 1 << 52, 1 << 52), TOTAL), "is too large"),
    "a large power": (graph_of(("operator.pow", 10, 1 << 50), TOTAL), "out of range"),
    "a type": (graph_of(("sum", LP, {"dtype": "float64"})), "kind 'dtype' is not allowed"),
    "a device": (graph_of(("sum", LP, {"device": "cuda"})), "kind 'device' is not allowed"),
    "an index by a tensor": (graph_of(("operator.getitem", LP, LP), TOTAL), "use where for masks"),
    "an index outside": (graph_of(("operator.getitem", LP, 99), TOTAL), "out of bounds"),
    "more arguments": (graph_of(("exp", LP, 1.0), TOTAL), "takes"),
    "a vector": (graph_of(("exp", LP)), "must return a scalar loss"),
    "no gradient": (graph_of(("detach", LP), TOTAL), "does not depend on logprobs"),
    "a strange argument": (graph_of(("sum", LP, {"a": 1, "b": 2})), "too many values"),
    "a reference that is none": (graph_of(("sum", {"ref": 5})), "5"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_graph_that_goes_astray_is_refused_by_name_of_its_node(name):
    graph, message = BAD_RUNS[name]
    loss = found(graph)

    with pytest.raises(InvalidRequest, match=f"loss 'l'.*{message}"):
        loss.prepare(case()["logprobs"], {})


def test_results_that_grow_with_the_square_of_the_tokens_are_refused():
    rows = ("unsqueeze", LP, 1)
    square = graph_of(rows, ("operator.mul", X0, LP), ("sum", X1))
    loss = found(square)

    with pytest.raises(InvalidRequest, match=r"node x1 .*more than 400000 elements in all"):
        loss.prepare(torch.zeros(20_000), {})
    assert loss.prepare(torch.ones(30), {})["value"][0] == 900


def test_a_copy_laid_side_by_side_again_and_again_is_refused():
    doubling = graph_of(
        ("torch.cat", [LP, LP]),
        *(("torch.cat", [{"ref": f"x{i}"}] * 2) for i in range(60)),
        ("sum", {"ref": "x60"}),
    )

    with pytest.raises(InvalidRequest, match="elements in all"):
        found(doubling).prepare(torch.zeros(N), {})


@pytest.mark.parametrize(
    "text", ["", "loss-1", "loss:", "loss:AAAA", "loss:%%%", "loss:" + "A" * 100_000]
)
def test_an_id_that_is_none_is_refused(text):
    with pytest.raises(InvalidRequest, match="is not an id of this server"):
        custom_loss.from_config({"loss_id": text})


def test_a_packed_graph_cannot_grow_beyond_the_limit():
    packed = loss_graphs.zstd.compress(bytes(1 << 28))

    with pytest.raises(InvalidRequest, match="is not an id of this server"):
        loss_graphs.from_id("loss:" + base64.urlsafe_b64encode(packed).decode())


def test_too_large_a_graph_has_no_id():
    wide = graph_of(("torch.cat", [LP] * 20_000), TOTAL)

    with pytest.raises(InvalidRequest, match="over the limit of 65536"):
        loss_graphs.loss_id(wide)


@pytest.mark.parametrize("config", [{}, {"loss_id": 1.0}, {"loss_id": "loss:A", "beta": 1.0}])
def test_the_configuration_is_the_id_and_nothing_else(config):
    with pytest.raises(InvalidRequest, match="custom takes loss_id"):
        custom_loss.from_config(config)


@pytest.fixture
def model(engine):
    engine.create("m", LoraShape(rank=4))
    return "m"


def sent(seed, **extra):
    datum = random_datum(20 + seed, seed=seed)
    return msgspec.structs.replace(datum, inputs={**datum.inputs, **extra})


def test_a_custom_cross_entropy_equals_the_built_in_one(engine, model):
    data = (sent(1), sent(2), sent(3))
    config = {"loss_id": loss_graphs.loss_id(traced(neg_ll, logprobs=1, weights=1))}
    ours = ForwardBackward(data=data, loss_fn="custom", loss_config=config)
    built_in = engine.forward_backward(model, ForwardBackward(data=data, loss_fn="cross_entropy"))
    expected = engine._adapters.get(model).gradient.clone()
    engine.optim_step(model, OptimStep(learning_rate=0.0))

    done = engine.forward_backward(model, ours)

    torch.testing.assert_close(engine._adapters.get(model).gradient, expected)
    assert done.logprobs == built_in.logprobs
    assert done.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-6)
    assert done.metrics["custom/neg_ll:sum"] == pytest.approx(done.metrics["loss:sum"], rel=1e-6)
    firsts = [np.frombuffer(wire.data, "<f4")[0] for wire in done.logprobs]
    assert done.metrics["custom/first:mean"] == pytest.approx(np.mean(firsts), rel=1e-6)


def test_what_the_loss_does_not_read_may_be_there_and_a_scalar_comes_as_one_number(engine, model):
    config = {"loss_id": loss_graphs.loss_id(traced(margin, logprobs=1, beta=0))}
    data = (sent(1, beta=tensor([0.5], "float32"), other=tensor([[1, 2]], "int64")),)

    done = engine.forward_backward(
        model, ForwardBackward(data=data, loss_fn="custom", loss_config=config)
    )

    gap = done.metrics["custom/gap:mean"]
    assert done.metrics["loss:sum"] == pytest.approx(math.log1p(math.exp(-0.5 * gap)), rel=1e-4)


BAD_DATA = {
    "missing": (
        Datum(tokens=sent(1).tokens, inputs={"target_tokens": sent(1).inputs["target_tokens"]}),
        "'weights'\\]: missing",
    ),
    "rank": (sent(1, weights=tensor([[1.0]] * 21, "float32")), "shape \\[21, 1\\] has not 1 dim"),
    "length": (sent(1, weights=tensor([1.0], "float32")), "of which the first is 21"),
    "rows": (sent(1, target_tokens=tensor([[1]] * 21, "int64")), "custom does not take"),
    "NaN": (sent(1, weights=tensor([math.nan] * 21, "float32")), "nan is not a finite number"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_the_loss_was_not_declared_for_are_refused(engine, model, name):
    bad, message = BAD_DATA[name]
    config = {"loss_id": loss_graphs.loss_id(traced(neg_ll, logprobs=1, weights=1))}

    with pytest.raises(InvalidRequest, match=rf"data\[1\].loss_fn_inputs\[.*{message}"):
        engine.forward_backward(
            model, ForwardBackward(data=(sent(2), bad), loss_fn="custom", loss_config=config)
        )
    assert engine._adapters.get(model).gradient is None

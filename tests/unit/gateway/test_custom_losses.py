"""Losses that clients define: an id for those that a trainer can carry out, and for no others."""

from __future__ import annotations

import pytest

from tinsmith import loss_graphs

OTHER = "tml-bob"
INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]


def node(op, name, target, *args):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}


def body(session, *, target="operator.mul", inputs=INPUTS, **changes):
    nodes = [
        *(node("placeholder", each["name"], each["name"]) for each in INPUTS),
        node("call_function", "mul", target, {"ref": "logprobs"}, {"ref": "weights"}),
        node("call_method", "total", "sum", {"ref": "mul"}),
        node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]}),
    ]
    graph = {"format": 1, "nodes": nodes}
    asked = {"session_id": session, "custom_loss_seq_id": 0, "name": "n", "inputs": inputs}
    return asked | {"graph": graph, "type": "create_custom_loss"} | changes


@pytest.fixture
async def session(rig):
    return (await rig.post("create_session", {})).json["session_id"]


async def create(rig, *args, **kwargs):
    return await rig.post("create_custom_loss", body(*args, **kwargs))


async def poll(rig, request_id, **kwargs):
    return await rig.post("retrieve_future", {"request_id": request_id}, **kwargs)


async def test_the_id_of_a_loss_is_the_loss(rig, session):
    promise = (await create(rig, session)).json["request_id"]

    answer = await poll(rig, promise)

    assert answer.json["type"] == "create_custom_loss"
    loss = loss_graphs.from_id(answer.json["loss_id"])
    assert [each.name for each in loss.inputs] == ["logprobs", "weights"]
    assert [each.name for each in loss.graph.nodes][-2:] == ["total", "output"]


async def test_a_loss_sent_again_is_the_same(rig, session):
    first, second = [(await create(rig, session)).json for _ in range(2)]

    assert first == second


async def test_another_key_does_not_get_it(rig, session):
    promise = (await create(rig, session)).json["request_id"]

    assert (await poll(rig, promise, key=OTHER)).status == 404


async def test_an_operation_that_is_not_allowed_is_named(rig, session):
    answer = await create(rig, session, target="torch.load")

    assert answer.status == 400
    assert (
        "graph.nodes[2] (mul): 'torch.load' is not allowed; allowed are abs, add" in answer.detail
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"graph": {"format": 2, "nodes": []}}, "graph.format"),
        ({"graph": {"format": 1, "nodes": []}}, "graph.nodes"),
        ({"graph": {"format": 1, "nodes": [node("call_module", "a", "b")] * 2}}, "nodes[0].op"),
        ({"inputs": []}, "inputs"),
        ({"inputs": INPUTS * 9}, "inputs"),
        ({"inputs": INPUTS[::-1]}, "inputs"),
        ({"inputs": [{"name": "logprobs", "rank": 3}]}, "inputs[0].rank"),
    ],
)
async def test_a_malformed_loss_is_refused_by_field(rig, session, changes, field):
    answer = await create(rig, session, **changes)

    assert answer.status == 400
    assert field in answer.detail


async def test_a_session_that_has_ended_gets_none(rig, session):
    end = {"reason": {"type": "success"}, "detail": None}
    await rig.post(f"sessions/{session}/finish", end)

    assert (await create(rig, session)).status == 410


@pytest.mark.parametrize("forged", ["loss:", "loss:AAAA", "loss:" + "A" * 70_000])
async def test_a_poll_for_a_loss_that_was_not_made_here_is_refused(rig, session, forged):
    answer = await poll(rig, f"{session}:{forged}")

    assert answer.status == 400
    assert "is not an id of this server" in answer.detail

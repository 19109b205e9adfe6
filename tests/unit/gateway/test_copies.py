"""Copies of checkpoints."""

from __future__ import annotations

import pytest

OTHER = "tml-bob"


@pytest.fixture
async def path(rig):
    return await rig.checkpoint(await rig.model(), user_metadata={"k": "v"}, expires_ns=2**62)


async def copy(rig, path, *, key="tml-alice", repeat="r1", token=None, **body):
    headers = {"X-Idempotency-Key": repeat}
    if token is not None:
        headers["X-Tinker-Weights-Access-Token"] = token
    body = {"source_path": path} | (body or {"destination_project_id": "archive"})
    return await rig.post("copy_weights", body, key=key, headers=headers)


async def test_a_copy_is_a_checkpoint_of_a_run_in_the_project(rig, path):
    made = (await copy(rig, path)).json["tinker_path"]

    listed = (await rig.get("checkpoints?project_id=archive")).json["checkpoints"]

    assert made != path
    assert [(c["tinker_path"], c["expires_at"], c["user_metadata"]) for c in listed] == [
        (made, None, {})
    ]


async def test_a_copy_that_is_asked_for_again_is_made_once(rig, path):
    first, again = [(await copy(rig, path)).json["tinker_path"] for _ in range(2)]
    another = (await copy(rig, path, repeat="r2")).json["tinker_path"]

    assert first == again != another


async def test_a_copy_outlives_its_source(rig, path):
    made = (await copy(rig, path)).json["tinker_path"]
    run, kind, name = path.removeprefix("tinker://").split("/")
    await rig.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}")

    assert (await rig.post("weights_info", {"tinker_path": made})).status == 200


async def test_a_copy_can_go_into_a_slot_of_a_session(rig, path):
    session = await rig.session()

    made = await copy(rig, path, session_id=session, model_seq_id=4)
    other = await rig.checkpoint(await rig.model())
    taken = await copy(rig, other, session_id=session, model_seq_id=4)

    assert made.json["tinker_path"] == f"tinker://{session}:train:4/weights/step1"
    assert (taken.status, "model_seq_id" in taken.detail) == (400, True)


async def test_what_is_somebody_else_s_is_copied_with_its_owner_s_token_only(rig, path):
    without = await copy(rig, path, key=OTHER)
    with_token = await copy(rig, path, key=OTHER, token="tml-alice")
    mine = (await rig.get("checkpoints", key=OTHER)).json["checkpoints"]

    assert (without.status, with_token.status) == (404, 200)
    assert [c["tinker_path"] for c in mine] == [with_token.json["tinker_path"]]


@pytest.mark.parametrize(
    "body",
    [
        {"destination_project_id": "a/b"},
        {"ttl_seconds": 60},
        {"session_id": "x"},
        {"ttl_seconds": None},
    ],
)
async def test_a_copy_to_nowhere_is_refused(rig, path, body):
    assert (await copy(rig, path, **body)).status == 400

"""Searching sessions, and their projects."""

from __future__ import annotations

import pytest

OTHER = "tml-bob"


@pytest.fixture
async def sessions(rig):
    """Three sessions, oldest first; the last one has ended."""
    made = []
    for n in range(3):
        body = {
            "display_name": f"Nightly run {n}",
            "user_metadata": {"n": n},
            "project_id": f"p{n}",
        }
        made.append((await rig.post("create_session", body)).json["session_id"])
    await rig.post(f"sessions/{made[2]}/finish", {"reason": {"type": "errored"}, "detail": "why"})
    await rig.session(key=OTHER)
    return made


async def found(rig, **body):
    answer = await rig.post("sessions/search", body)
    return [session["session_id"] for session in answer.json["sessions"]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [2, 1, 0]),
        ({"display_name": "RUN nightly 1"}, [1]),
        ({"project_ids": ["p0", "p2"]}, [2, 0]),
        ({"user_metadata": {"n": "1"}}, [1]),
        ({"owner": {"type": "accessible"}}, [2, 1, 0]),
        ({"owner": {"type": "user", "owner_urns": ["nobody"]}}, []),
        ({"statuses": [{"type": "active"}]}, [1, 0]),
        ({"statuses": [{"type": "client_finished", "reasons": ["errored"]}]}, [2]),
        ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, []),
        ({"statuses": [{"type": "failed"}, {"type": "cancelled"}]}, []),
    ],
)
async def test_every_filter_that_is_given_must_match(rig, sessions, query, expected):
    assert await found(rig, **query) == [sessions[n] for n in expected]


async def test_with_an_id_and_a_name_either_will_do(rig, sessions):
    assert await found(rig, session_id=sessions[0], display_name="run 1") == sessions[1::-1]


async def test_pages_follow_each_other_without_a_gap(rig, sessions):
    seen, cursor = [], None
    while True:
        body = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        answer = (await rig.post("sessions/search", body)).json
        seen += [session["session_id"] for session in answer["sessions"]]
        if (cursor := answer.get("next_cursor")) is None:
            break

    assert seen == sessions[::-1]


async def test_a_summary_tells_of_status_and_checkpoints(rig, sessions):
    await rig.checkpoint(await rig.model(sessions[1]))

    ended, live, _ = (await rig.post("sessions/search", {})).json["sessions"]

    assert ended["status"]["reason"] == {"type": "errored"}
    assert (live["status"], live["project_id"]) == ({"type": "active"}, "p1")
    assert (live["checkpoints_count"], live["checkpoint_storage_bytes"]) == (1, 20)
    assert live["user_metadata"] == {"n": "1"}


async def test_a_session_moves_with_its_runs_to_another_project(rig, sessions):
    model = await rig.model(sessions[0])
    answer = await rig.call(
        "PUT", f"/api/v1/sessions/{sessions[0]}/project", json={"project_id": "q"}
    )

    listed = (await rig.get("training_runs?project_id=q")).json["training_runs"]

    assert (answer.status, [run["training_run_id"] for run in listed]) == (200, [model])
    assert await found(rig, project_ids=["q"]) == [sessions[0]]


@pytest.mark.parametrize("body", [{}, {"project_id": ""}, {"project_id": "a b"}])
async def test_a_project_that_cannot_be_is_refused(rig, sessions, body):
    answer = await rig.call("PUT", f"/api/v1/sessions/{sessions[0]}/project", json=body)

    assert (answer.status, "project_id" in answer.detail) == (400, True)


async def test_somebody_else_s_session_is_not_moved(rig, sessions):
    path = f"/api/v1/sessions/{sessions[0]}/project"

    assert (await rig.call("PUT", path, json={"project_id": "q"}, key=OTHER)).status == 404


@pytest.mark.parametrize(
    "body",
    [{"limit": 0}, {"limit": 201}, {"cursor": {"last_created_at": "x", "last_session_id": "y"}}],
)
async def test_a_search_that_makes_no_sense_is_400(rig, body):
    assert (await rig.post("sessions/search", body)).status == 400

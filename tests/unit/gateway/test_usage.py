"""Use by the hour, storage, and the key itself."""

from __future__ import annotations

import pytest

from tinsmith.keys import owner_of_key
from tinsmith.messages.registry import Usage
from tinsmith.messages.table import USAGE

HOUR = 472_222  # 2023-11-14T22:00
WINDOW = "billing/usage/events?starting_on=2023-11-14T22:00:00Z&ending_before=2023-11-15T00:00:00Z"


@pytest.fixture
async def session(rig):
    body = {"project_id": "p", "user_metadata": {"k": 1}}
    return (await rig.post("create_session", body)).json["session_id"]


@pytest.fixture
async def used(rig, session):
    """Two hours of use, the second one outside of the window, and somebody else's."""
    for n, (hour, owner) in enumerate(((HOUR, "alice"), (HOUR + 5, "alice"), (HOUR, "bob"))):
        entry = Usage(
            hour=hour,
            target="t",
            owner=owner_of_key(f"tml-{owner}"),
            session_id=session,
            base_model="tiny/model",
            trained_tokens=7,
            cached_tokens=2,
            sampled_tokens=9,
            checkpoints=1,
            byte_seconds=3600 * 10**9,
        )
        await rig.bus.table(USAGE).put(str(n), entry)


async def test_the_caller_s_hours_in_the_window_are_told(rig, session, used):
    answer = (await rig.get(WINDOW)).json

    assert [event["event_info"] for event in answer["data"]] == [
        {"type": "sampling_sample", "token_count": 9},
        {"type": "training", "token_count": 7},
        {"type": "sampling_prefill", "cached": True, "token_count": 2},
        {"type": "checkpoint", "count": 1},
        {"type": "storage", "gigabyte_hours": 1.0},
    ]
    assert {event["project_id"] for event in answer["data"]} == {"p"}
    assert answer["sessions"] == {session: {"user_metadata": {"k": "1"}}}
    assert answer["data"][0]["bucket_start"] == "2023-11-14T22:00:00+00:00"


@pytest.mark.parametrize(
    "query",
    [
        "",
        "starting_on=2023-11-14T22:00:00Z",
        "starting_on=2023-11-14T22:30:00Z&ending_before=2023-11-15T00:00:00Z",
        "starting_on=2023-11-14T22:00:00&ending_before=2023-11-15T00:00:00Z",
        "starting_on=2023-11-14T22:00:00Z&ending_before=2023-11-14T22:00:00Z",
        "starting_on=2023-11-14T22:00:00Z&ending_before=2023-12-14T22:00:00Z",
    ],
)
async def test_a_window_that_makes_no_sense_is_400(rig, query):
    answer = await rig.get(f"billing/usage/events?{query}")

    assert answer.status == 400
    assert "starting_on" in answer.detail or "ending_before" in answer.detail


async def test_storage_is_told_by_project(rig, session):
    await rig.checkpoint(await rig.model(session))
    await rig.checkpoint(await rig.model())
    await rig.checkpoint(await rig.model(key="tml-bob"))

    everything = (await rig.get("billing/usage/checkpoints/current")).json["data"]
    one = (await rig.get("billing/usage/checkpoints/current?project_id=p")).json["data"]

    assert [(item["project_id"], item["size_bytes"]) for item in everything] == [
        (None, 20),
        ("p", 20),
    ]
    assert [(item["project_id"], item["checkpoint_count"]) for item in one] == [("p", 1)]


async def test_a_key_is_told_what_it_is(rig):
    answer = (await rig.get("auth/apikey/me")).json

    assert answer["name"] == owner_of_key("tml-alice")
    assert isinstance(answer["key_id"], int)
    assert "tml-alice" not in str(answer)

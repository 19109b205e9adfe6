"""Lists of runs, checkpoints and sessions; and questions about single ones."""

from __future__ import annotations

import time

import pytest

from tinsmith import ids
from tinsmith.messages.registry import Run
from tinsmith.messages.table import RUNS

MODEL = "tiny/model"
OTHER = "tml-bob"


@pytest.fixture
async def runs(rig):
    """Three models, oldest first."""
    session = await rig.session()
    return [await rig.model(session, order=order) for order in range(3)]


async def test_runs_are_listed_newest_first_in_pages(rig, runs):
    await rig.model(key=OTHER)

    answer = (await rig.get("training_runs?limit=2&offset=0&access_scope=owned")).json
    rest = (await rig.get("training_runs?limit=2&offset=2")).json

    listed = [run["training_run_id"] for run in answer["training_runs"] + rest["training_runs"]]
    assert listed == runs[::-1]
    assert answer["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}


async def test_a_run_tells_of_its_last_checkpoints(rig, runs):
    await rig.checkpoint(runs[0], name="old", created_ns=1_000_000_000)
    newest = await rig.checkpoint(runs[0], name="new", created_ns=2_000_000_000_000_000_000)
    sampler = await rig.checkpoint(runs[0], "sampler_weights", "s")

    run = (await rig.get(f"training_runs/{runs[0]}")).json

    assert run["last_checkpoint"]["tinker_path"] == newest
    assert run["last_sampler_checkpoint"]["tinker_path"] == sampler
    assert run["last_request_time"] == "2033-05-18T03:33:20+00:00"
    assert (run["base_model"], run["is_lora"], run["lora_rank"]) == (MODEL, True, 8)


async def test_a_run_without_checkpoints_was_last_asked_for_when_it_was_made(rig, runs):
    stored = await rig.bus.table(RUNS).get(ids.token(runs[0]))
    assert isinstance(stored, Run)

    run = (await rig.get(f"training_runs/{runs[0]}")).json

    assert run["last_checkpoint"] is None
    assert run["last_request_time"].startswith(time.strftime("%Y-", time.gmtime()))


async def test_a_run_s_checkpoints_are_those_with_a_name(rig, runs):
    path = await rig.checkpoint(runs[0], user_metadata={"k": "v"})
    await rig.checkpoint(runs[0], "ephemeral", "x")
    await rig.checkpoint(runs[0], name="gone", expires_ns=1)
    await rig.checkpoint(runs[1])

    listed = (await rig.get(f"training_runs/{runs[0]}/checkpoints")).json["checkpoints"]

    assert listed == [
        {
            "checkpoint_id": "weights/step1",
            "checkpoint_type": "training",
            "time": "2023-11-14T22:13:20+00:00",
            "tinker_path": path,
            "size_bytes": 20,
            "public": False,
            "user_metadata": {"k": "v"},
            "expires_at": None,
        }
    ]


async def test_all_checkpoints_of_a_user_are_listed_in_pages(rig, runs):
    theirs = await rig.checkpoint(await rig.model(key=OTHER))
    paths = [await rig.checkpoint(run, created_ns=n) for n, run in enumerate(runs, 1)]

    answer = (await rig.get("checkpoints?limit=2&offset=1")).json

    assert [c["tinker_path"] for c in answer["checkpoints"]] == [paths[1], paths[0]]
    assert answer["cursor"]["total_count"] == 3
    assert theirs not in str(answer)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "offset=-1", "limit=x", "offset=1.5", "project_id=/"]
)
async def test_a_query_that_makes_no_sense_is_400(rig, query):
    answer = await rig.get(f"training_runs?{query}")

    assert (answer.status, query.partition("=")[0] in answer.detail) == (400, True)


async def test_sessions_are_listed_newest_first(rig):
    sessions = [await rig.session() for _ in range(3)]
    await rig.session(key=OTHER)

    assert (await rig.get("sessions?limit=2")).json == {"sessions": sessions[:0:-1]}


async def test_a_session_tells_what_was_made_in_it(rig):
    session = await rig.session()
    models = [await rig.model(session, order=order) for order in range(2)]
    sampler = await rig.sampler(session)
    await rig.model()

    answer = (await rig.get(f"sessions/{session}?access_scope=owned")).json

    assert answer["training_run_ids"] == models
    assert (answer["sampler_ids"], answer["user_metadata"]) == ([sampler], {})


async def test_a_checkpoint_s_info_has_its_shape(rig, runs):
    path = await rig.checkpoint(runs[0])

    answer = (await rig.post("weights_info", {"tinker_path": path})).json

    assert answer == {
        "base_model": MODEL,
        "is_lora": True,
        "lora_rank": 8,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }


@pytest.mark.parametrize("path", ["training_runs/{}", "training_runs/{}/checkpoints"])
async def test_what_is_not_yours_is_not_there(rig, path):
    model = await rig.model(key=OTHER)

    assert (await rig.get(path.format(model))).status == 404

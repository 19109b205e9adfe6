"""What an owner does with checkpoints, and what others may do with published ones."""

from __future__ import annotations

import time

import pytest

OTHER = "tml-bob"
KINDS = ("weights", "sampler_weights", "external_weights")


@pytest.fixture
async def model(rig):
    return await rig.model()


@pytest.fixture
async def path(rig, model):
    return await rig.checkpoint(model, user_metadata={"k": "v"})


def url(path, suffix=""):
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}{suffix}"


async def listed(rig, path, **kwargs):
    run = path.removeprefix("tinker://").split("/")[0]
    answer = await rig.get(f"training_runs/{run}/checkpoints", **kwargs)
    return answer.json.get("checkpoints")


async def info(rig, path, **kwargs):
    return await rig.post("weights_info", {"tinker_path": path}, **kwargs)


async def test_a_deleted_checkpoint_is_gone_at_once(rig, path):
    deleted = await rig.call("DELETE", url(path))
    again = await rig.call("DELETE", url(path))

    assert (deleted.status, again.status, await listed(rig, path)) == (200, 404, [])
    assert (await info(rig, path)).status == 404


async def test_a_published_checkpoint_can_be_read_by_everybody(rig, path):
    before = await info(rig, path, key=OTHER)
    await rig.call("POST", url(path, "/publish"))
    again = await rig.call("POST", url(path, "/publish"))
    after = await info(rig, path, key=OTHER)

    assert (before.status, again.status, after.status) == (404, 200, 200)
    assert [c["public"] for c in await listed(rig, path)] == [True]


async def test_a_hidden_checkpoint_is_not_there_for_others(rig, path):
    await rig.call("POST", url(path, "/publish"))
    await rig.call("DELETE", url(path, "/publish"))
    answer = await info(rig, path, key=OTHER)
    never = await info(rig, path.replace("step1", "never"), key=OTHER)

    assert answer.status == never.status == 404
    assert answer.detail.replace("step1", "never") == never.detail


async def test_of_somebody_else_s_run_only_what_is_published_is_seen(rig, model, path):
    await rig.checkpoint(model, name="private")
    await rig.call("POST", url(path, "/publish"))

    seen = await listed(rig, path, key=OTHER)
    run = await rig.get(f"training_runs/{model}?access_scope=accessible", key=OTHER)
    owned = await rig.get(f"training_runs/{model}?access_scope=owned", key=OTHER)

    assert [c["tinker_path"] for c in seen] == [path]
    assert run.json["last_checkpoint"]["tinker_path"] == path
    assert owned.status == 404


async def test_a_published_checkpoint_can_be_loaded_by_another_owner(rig, path):
    await rig.call("POST", url(path, "/publish"))
    session = await rig.session(key=OTHER)
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}

    answer = await rig.post("load_weights", body, key=OTHER)

    assert (answer.status, answer.json["model_id"]) == (200, f"{session}:train:0")


async def test_a_token_gives_access_to_its_owner_s_checkpoints(rig, path):
    session = await rig.session(key=OTHER)
    body = {"session_id": session, "model_seq_id": 0, "path": path}

    without = await rig.post("load_weights", body, key=OTHER)
    wrong = await rig.post("load_weights", body | {"weights_access_token": "tml-x"}, key=OTHER)
    right = await rig.post("load_weights", body | {"weights_access_token": "tml-alice"}, key=OTHER)

    assert (without.status, wrong.status, right.status) == (404, 400, 200)
    assert "weights_access_token" in wrong.detail


@pytest.mark.parametrize(
    ("method", "suffix"),
    [("DELETE", ""), ("POST", "/publish"), ("DELETE", "/publish"), ("PUT", "/ttl")],
)
async def test_only_the_owner_changes_a_checkpoint(rig, path, method, suffix):
    await rig.call("POST", url(path, "/publish"))
    body = {"ttl_seconds": 7200} if suffix == "/ttl" else None

    answer = await rig.call(method, url(path, suffix), key=OTHER, json=body)
    never = await rig.call(method, url(path.replace("step1", "never"), suffix), json=body)

    assert answer.status == never.status == 404
    assert answer.detail.replace("step1", "never") == never.detail
    assert (await listed(rig, path))[0]["public"]


async def test_a_time_to_live_is_set_extended_and_removed(rig, path):
    expiries = []
    for ttl_s in (3600, 86400, None):
        assert (await rig.call("PUT", url(path, "/ttl"), json={"ttl_seconds": ttl_s})).status == 200
        expiries.append((await listed(rig, path))[0]["expires_at"])

    assert expiries[0] < expiries[1]
    assert expiries[2] is None


@pytest.mark.parametrize("ttl_s", [0, 3599, 10 * 365 * 86400 + 1, "1h", 3600.5])
async def test_a_time_to_live_out_of_range_is_refused(rig, path, ttl_s):
    answer = await rig.call("PUT", url(path, "/ttl"), json={"ttl_seconds": ttl_s})

    assert (answer.status, "ttl_seconds" in answer.detail) == (400, True)


async def test_an_expired_checkpoint_says_when_it_expired(rig, model):
    path = await rig.checkpoint(model, expires_ns=1_700_000_000_000_000_000)

    answers = [
        await info(rig, path),
        await rig.call("PUT", url(path, "/ttl"), json={"ttl_seconds": 7200}),
    ]

    assert [answer.status for answer in answers] == [410, 410]
    assert "2023-11-14T22:13:20" in answers[0].detail


async def test_an_expired_checkpoint_can_be_deleted(rig, model):
    path = await rig.checkpoint(model, expires_ns=1)

    assert (await rig.call("DELETE", url(path))).status == 200


@pytest.mark.parametrize("part", ["kind", "name"])
async def test_a_checkpoint_id_that_cannot_be_is_refused(rig, model, part):
    kind, name = ("ephemeral", "x") if part == "kind" else ("weights", "%2e%2e%2fx")

    answer = await rig.call("DELETE", f"/api/v1/training_runs/{model}/checkpoints/{kind}/{name}")

    assert answer.status == 400


async def test_what_an_owner_did_is_audited(rig, path):
    await rig.call("POST", url(path, "/publish"))
    await rig.call("DELETE", url(path))

    entries = (await rig.get("audit?event_type=checkpoints")).json["entries"]

    assert [e["event"] for e in entries] == ["checkpoint_published", "checkpoint_deleted"]
    assert {e["tinker_path"] for e in entries} == {path}
    assert entries[0]["timestamp"].startswith(time.strftime("%Y-", time.gmtime()))


async def test_nobody_reads_the_trail_of_others(rig, path):
    await rig.call("POST", url(path, "/publish"))

    assert (await rig.get("audit", key=OTHER)).json == {"entries": []}


@pytest.mark.parametrize("query", ["event_type=x", "day=yesterday"])
async def test_an_audit_query_that_makes_no_sense_is_400(rig, query):
    answer = await rig.get(f"audit?{query}")

    assert (answer.status, query.partition("=")[0] in answer.detail) == (400, True)

"""The dashboard's routes: what each caller sees, their bounds, and how the page is sent."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from tests.unit.gateway.conftest import KEY, MODEL, OTHER_KEY

from tinsmith import ids
from tinsmith.keys import owner_of_key
from tinsmith.messages import ops
from tinsmith.messages.base import Failed, Tensor
from tinsmith.messages.registry import Usage
from tinsmith.messages.table import LINEAGES, USAGE, WEIGHTS_STATUS
from tinsmith.messages.weights import LineageHead, WeightsStatus, WeightsStored
from tinsmith_gateway.auth import with_operators
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.dashboard import curves, files, tail

OVERVIEW = "dashboard/overview"
LOSSES = "loss:sum"


@pytest.fixture
def config(config, replace):
    """Bob's key is an operator's."""
    return replace(config, operators=(owner_of_key(OTHER_KEY),))


def forward_backward(model_id, seq):
    return ops.Op(
        model_id=model_id, seq=seq, body=ops.ForwardBackward(data=(), loss_fn="cross_entropy")
    )


def measured(loss):
    logprobs = (Tensor(dtype="float32", shape=(4,), data=bytes(16)),)
    return ops.ForwardBackwardDone(logprobs=logprobs, metrics={LOSSES: loss})


async def trained(rig, count, **kwargs):
    """A run whose log has ``count`` operations from 1 on, the even ones steps."""
    model_id = await rig.model(**kwargs)
    for seq in range(1, count + 1):
        if seq % 2:
            rig.bus.log.append(forward_backward(model_id, seq), measured(float(seq)))
        else:
            step = ops.Op(model_id=model_id, seq=seq, body=ops.OptimStep())
            rig.bus.log.append(step, ops.OptimStepDone())
    return model_id


async def all_points(rig, model_id, points):
    after, found = -1, []
    while True:
        told = (
            await rig.get(f"dashboard/runs/{model_id}/curves?after={after}&points={points}")
        ).json
        found += told["points"]
        after = told["next"]
        if not told["has_more"]:
            return found, after


async def test_the_page_is_sent_without_a_key_and_holds_everything_it_names(rig):
    page = await rig.call("GET", "/", key=None)
    named = re.findall(rb'(?:href|src)="(dashboard/[^"]+)"', page.raw)

    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert len(named) >= 5
    for name in named:
        assert (await rig.call("GET", f"/{name.decode()}", key=None)).status == 200


@pytest.mark.parametrize("name", sorted(files.read()))
async def test_each_file_of_the_page_has_a_type_and_a_policy_and_is_not_sent_twice(rig, name):
    sent = await rig.call("GET", f"/dashboard/{name}", key=None)
    again = await rig.call(
        "GET", f"/dashboard/{name}", key=None, headers={"If-None-Match": sent.headers["ETag"]}
    )
    policy = sent.headers["Content-Security-Policy"]

    assert sent.status == 200
    assert sent.headers["X-Content-Type-Options"] == "nosniff"
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert (again.status, again.raw) == (304, b"")


@pytest.mark.parametrize("kind", ["style=", "onclick=", "onload=", "<script>", "<style"])
def test_nothing_in_the_page_is_inline(kind):
    assert kind not in (files.FOLDER / files.INDEX).read_text()


def test_no_script_of_ours_makes_html_of_text():
    for path in files.FOLDER.glob("*.js"):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.search(r"https?://", text), "the page works without internet"


@pytest.mark.parametrize(
    "path",
    [
        "../files.py",
        "..%2ffiles.py",
        "%2e%2e/files.py",
        "vendor/uPlot.min.css",
        "..%5cfiles.py",
        "index.html%00",
        "",
        "/etc/passwd",
        "%2fetc%2fpasswd",
    ],
)
async def test_no_path_leads_out_of_the_page(rig, path):
    from yarl import URL

    async with rig.http.get(URL(f"{rig.url}/dashboard/{path}", encoded=True)) as answer:
        assert answer.status in (401, 404)
        assert "import" not in await answer.text()


async def test_an_owner_sees_its_own_runs_and_no_services(rig):
    mine, theirs = await rig.model(key=KEY), await rig.model(key=OTHER_KEY)
    await rig.announce("trainer", MODEL, load={"busy": 0.5})

    told = (await rig.get(OVERVIEW)).json

    assert [run["model_id"] for run in told["runs"]] == [mine]
    assert not told["me"]["is_operator"]
    assert not told.keys() & {"services", "queues", "problems"}
    assert theirs not in str(told)


async def test_an_operator_sees_services_queues_and_the_runs_of_all(rig):
    mine, theirs = await rig.model(key=KEY), await rig.model(key=OTHER_KEY)
    await rig.announce("trainer", MODEL, load={"busy": 0.5})

    told = (await rig.get(OVERVIEW, key=OTHER_KEY)).json
    detail = await rig.get(f"dashboard/runs/{mine}", key=OTHER_KEY)

    assert {run["model_id"] for run in told["runs"]} == {mine, theirs}
    assert [one["load"] for one in told["services"]] == [{"busy": 0.5}]
    assert {queue["name"] for queue in told["queues"]} == {"ops", "placements", "samples", "held"}
    assert detail.json["commands"]["replay"] == f"tinsmith replay {mine}"


async def test_what_an_operator_asks_for_and_nobody_has_is_not_there(rig):
    absent = f"{ids.new_session_id()}:train:0"

    assert (await rig.get(f"dashboard/runs/{absent}", key=OTHER_KEY)).status == 404


def test_the_key_that_tinsmith_up_made_is_an_operator_s_and_configured_ones_are_not():
    made, keys = Path("/data/api-key"), ("tml-x",)
    owner = owner_of_key("tml-x")

    assert with_operators(GatewayConfig(), keys, made).operators == (owner,)
    by_up = GatewayConfig(api_key_file=str(made))
    assert with_operators(by_up, keys, made).operators == (owner,)
    for config in (GatewayConfig(api_keys=keys), GatewayConfig(api_key_file="/etc/keys")):
        assert with_operators(config, keys, made).operators == ()


async def test_a_curve_has_each_operation_that_computed_and_goes_on_where_it_ended(rig):
    model_id = await trained(rig, 9)

    points, after = await all_points(rig, model_id, 500)
    rig.bus.log.append(forward_backward(model_id, 10), measured(10.0))
    told = (await rig.get(f"dashboard/runs/{model_id}/curves?after={after}")).json

    assert [point["seq"] for point in points] == [1, 3, 5, 7, 9]
    assert points[0]["metrics"] == {LOSSES: 1.0}
    assert points[0]["tokens"] == 4
    assert [point["seq"] for point in told["points"]] == [10]


async def test_a_long_curve_is_thinned_and_read_in_parts(rig, monkeypatch):
    monkeypatch.setattr(curves, "READS", 7)
    model_id = await trained(rig, 200)

    rig.bus.reads = 0
    await rig.get(f"dashboard/runs/{model_id}/curves?points=20")
    reads = rig.bus.reads
    points, after = await all_points(rig, model_id, 20)

    assert reads < 7 + curves.TRIES + 5  # and some look-ups of the run
    assert after == 200
    assert 10 <= len(points) <= 200
    assert points[0]["seq"] < 20
    assert points[-1]["seq"] > 180


@pytest.mark.parametrize("query", ["after=-2", "after=x", "points=0", "points=501", "points=1e9"])
async def test_a_curve_that_cannot_be_asked_for_is_refused(rig, query):
    model_id = await rig.model()

    answer = await rig.get(f"dashboard/runs/{model_id}/curves?{query}")

    assert answer.status == 400
    assert query.partition("=")[0] in answer.detail


async def test_what_is_not_a_number_is_null(rig):
    model_id = await rig.model()
    rig.bus.log.append(forward_backward(model_id, 1), measured(float("nan")))

    (point,), _ = await all_points(rig, model_id, 10)

    assert point["metrics"] == {LOSSES: None}


async def test_a_run_shows_the_end_of_its_log_and_that_it_links_up(rig):
    model_id = await trained(rig, 2 * tail.OPS)

    log = (await rig.get(f"dashboard/runs/{model_id}")).json["log"]

    assert log["last_op"] == 2 * tail.OPS
    assert [line["seq"] for line in log["lines"]] == list(range(tail.OPS + 1, 2 * tail.OPS + 1))
    assert log["is_linked"]
    assert log["lines"][0]["details"] == {"metrics": {LOSSES: float(tail.OPS + 1)}}
    assert log["head"] == log["lines"][-1]["blake3"]


async def test_a_chain_that_was_changed_does_not_link_up(rig, replace):
    model_id = await trained(rig, 5)
    records = rig.bus.log._records
    records[model_id, 2] = replace(records[model_id, 2], epoch=9)

    assert not (await rig.get(f"dashboard/runs/{model_id}")).json["log"]["is_linked"]


async def test_a_forgotten_run_shows_no_contents_not_even_what_was_read_before(rig, seals):
    model_id = await trained(rig, 3)
    assert (await all_points(rig, model_id, 10))[0]

    await seals.forget(model_id, reason="asked for")
    answer = await rig.get(f"dashboard/runs/{model_id}/curves")

    assert 400 <= answer.status < 500
    assert "forgotten" in answer.detail


async def test_errors_are_told_in_the_words_of_their_clients_and_to_nobody_else(rig):
    model_id, other = await rig.model(key=KEY), await rig.model(key=OTHER_KEY)
    for each in (model_id, other):
        failed = Failed(message=f"weights of {each} are odd", category="user")
        rig.bus.log.append(forward_backward(each, 1), failed)

    (error,) = (await rig.get(OVERVIEW)).json["errors"]

    assert error["message"] == f"weights of {model_id} are odd"
    assert (error["model_id"], error["seq"], error["category"]) == (model_id, 1, "user")


async def test_tokens_per_second_are_those_of_the_last_minute(rig):
    model_id = await trained(rig, 3)  # two computed, four tokens each

    assert (await rig.get(OVERVIEW)).json["tokens_per_s"] == {model_id: 8 / 60}


async def test_usage_is_told_by_owner_and_of_the_last_day(rig):
    now, owner = int(time.time()) // 3600, owner_of_key(KEY)
    for hour, tokens in ((now, 5), (now - 100, 7)):
        used = Usage(
            hour=hour,
            target="t",
            owner=owner,
            session_id="s",
            base_model=MODEL,
            trained_tokens=tokens,
        )
        await rig.bus.table(USAGE).put(f"{hour}", used)
    await rig.get("healthz")  # the views have heard of it

    (used,) = (await rig.get(OVERVIEW)).json["usage"]

    assert used["owner"] == owner
    assert (used["day"]["trained_tokens"], used["all"]["trained_tokens"]) == (5, 12)


async def test_published_weights_tell_their_density_and_who_serves_them(rig):
    model_id = await rig.model()
    head = LineageHead(
        lineage_id=model_id, epoch=1, version=2, root="r", full_version=1, stream_seq=2
    )
    chain = rig.bus.lineages.chains[model_id]
    for version, form, changed in ((1, "full", 0), (2, "delta", 3)):
        chain.append(
            WeightsStored(
                lineage_id=model_id,
                epoch=1,
                version=version,
                form=form,
                root="r",
                manifest=(),
                size=10,
                first_chunk=1,
                changed=changed,
                elements=12,
                prev_blake3="",
            )
        )
    await rig.bus.table(LINEAGES).put(ids.token(model_id), head)
    status = WeightsStatus(
        lineage_id=model_id, replica="s1", plane="p", state="active", version=1, lag_ms=5.0
    )
    await rig.bus.emit(WEIGHTS_STATUS, status)

    lineage = (await rig.get(f"dashboard/runs/{model_id}")).json["lineage"]

    assert [(one["form"], one["changed"]) for one in lineage["versions"]] == [
        ("full", 0),
        ("delta", 3),
    ]
    assert lineage["replicas"][0]["behind"] == 1
    assert lineage["replicas"][0]["lag_ms"] == 5.0


async def test_runs_are_listed_in_pages(rig):
    session = await rig.session()
    made = [await rig.model(session, order=order) for order in range(3)]

    told = (await rig.get("dashboard/runs?limit=2&offset=1")).json

    assert [run["model_id"] for run in told["runs"]] == made[1::-1]
    assert told["cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
    assert (await rig.get("dashboard/runs?limit=1001")).status == 400


async def test_data_that_has_not_changed_is_not_sent_again_and_never_stored(rig):
    model_id = await trained(rig, 3)
    path = f"dashboard/runs/{model_id}/curves"
    first = await rig.get(path)

    again = await rig.get(path, headers={"If-None-Match": first.headers["ETag"]})

    assert first.headers["Cache-Control"] == "no-store"
    assert first.headers["Content-Type"].startswith("application/json")
    assert "Set-Cookie" not in first.headers
    assert (again.status, again.raw) == (304, b"")


async def test_a_broker_that_is_away_is_said(rig):
    await rig.model()
    rig.bus.is_connected = False

    answer = await rig.get(OVERVIEW)

    assert answer.status == 503
    assert "broker" in answer.detail

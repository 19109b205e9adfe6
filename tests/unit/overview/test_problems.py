"""What of the facts is worth an operator's while."""

from __future__ import annotations

import msgspec
import pytest

from tinsmith.overview import facts
from tinsmith.overview.problems import problems

BASE = "tiny/llama"


def service(role, **changes):
    known = {"service": role, "instance": f"{role}-1", "version": "1", "base_models": (BASE,)}
    return facts.Service(**known | changes)


def run(**changes):
    known = {
        "model_id": "m", "session_id": "s", "owner": "o", "base_model": BASE, "rank": 8,
        "created_s": 1.0, "is_live": True,
    }  # fmt: skip
    return facts.Run(**known | changes)


def overview(**changes):
    roles = ("gateway", "checkpointer", "trainer", "sampler")
    known = {"at_s": 0.0, "services": tuple(map(service, roles))}
    return facts.Overview(**known | changes)


def told(found):
    return [problem.what for problem in problems(found)]


def broker(**changes):
    known = {"version": "2.12.0", "rtt_ms": 1.0, "skew_ms": 0.0, "storage": 1}
    return facts.Broker(**known | changes)


def test_all_is_well():
    assert told(overview(runs=(run(queued=3),), broker=broker())) == []


@pytest.mark.parametrize("role", ["gateway", "checkpointer", "trainer", "sampler"])
def test_a_role_that_nobody_has_is_named(role):
    there = [one for one in overview().services if one.service != role]
    (problem,) = problems(overview(services=tuple(there)))

    assert problem.what == f"no {role} is heard"
    assert f"tinsmith {role}" in problem.remedy


def test_work_that_waits_for_a_model_that_nobody_serves():
    other = run(base_model="other/one", queued=2)
    share = facts.Share(base_model="third/one", messages=7)
    queue = facts.Queue(name="samples", stream="TS_SAMPLE", messages=7, size=1, shares=(share,))
    found = list(problems(overview(runs=(other,), queues=(queue,))))

    assert [one.what for one in found] == [
        "no trainer of other/one is heard, and its runs wait",
        "no sampler of third/one is heard, and 7 samples wait",
    ]
    assert "tinsmith sampler --model third/one" in found[1].remedy


def test_a_model_without_work_needs_nobody():
    assert told(overview(runs=(run(base_model="other/one"),))) == []


def test_trouble_fences_full_streams_and_clocks_are_told():
    replica = facts.Replica(replica="sampler-1", plane="p", state="fenced", reason="bits differ")
    lineage = facts.Lineage(lineage_id="m", version=3, epoch=1, replicas=(replica,))
    full = facts.Stream(name="TS_OPS", kind="work queue", messages=1, size=95, max_bytes=100)
    rolling = facts.Stream(name="TS_AUDIT", kind="expiring", messages=1, size=100, max_bytes=100)
    services = (*overview().services, service("trainer", instance="trainer-2", trouble="no room"))
    found = told(
        overview(
            services=services,
            lineages=(lineage,),
            broker=broker(streams=(full, rolling), skew_ms=-2500.0, storage=9, max_storage=10),
        )
    )

    assert found == [
        "trainer-2: no room",
        "sampler-1 does not serve m: bits differ",
        "the broker's storage is 90% full",
        "TS_OPS is 95% full; requests will be answered with 429",
        "the broker's clock is -2.5 s from this machine's",
    ]


def test_several_versions_are_told():
    newer = (*overview().services, service("sampler", instance="sampler-2", version="2"))

    assert told(overview(services=newer)) == ["services of several versions are heard: 1, 2"]


def test_an_overview_survives_json():
    found = overview(runs=(run(),), broker=broker())

    assert msgspec.json.decode(msgspec.json.encode(found), type=facts.Overview) == found

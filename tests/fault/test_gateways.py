"""Several gateways, requests that never come, requests whose contents are lost."""

from __future__ import annotations

import pytest
from tests.fault import requests
from tests.fault.cluster import records, until

LAST = 12


def seqs(cluster, model):
    return [record.seq for record in records(cluster.log(model))]


@pytest.mark.timeout(600)
def test_two_gateways_are_one_server_and_one_of_them_may_die(new_cluster):
    cluster = new_cluster()
    *gateways, _ = cluster.start("gateway", "gateway", "trainer")
    here, there = (cluster.server(gateway) for gateway in gateways)
    model = requests.new_model(here, requests.new_session(there))
    ids = {}
    for seq in (3, 1, 2, 6, 5, 4, 8, 7):
        ids[seq] = requests.promised((here, there)[seq % 2], model, seq)
        assert requests.promised((there, here)[seq % 2], model, seq) == ids[seq]
    ids |= {seq: requests.promised(here, model, seq) for seq in (10, 11)}
    results = {seq: requests.read_result(there, ids[seq]) for seq in range(1, 9)}
    again = {seq: requests.read_result(here, ids[seq]) for seq in range(1, 9)}
    gateways[0].kill()
    ids |= {seq: requests.promised(there, model, seq) for seq in (12, 9)}
    rest = [requests.raw_result(there, ids[seq]) for seq in range(9, LAST + 1)]

    assert again == results
    assert not any("error" in str(results[seq]) for seq in results)
    assert not any(b"error" in raw for raw in rest)
    assert seqs(cluster, model) == list(range(LAST + 1))


@pytest.mark.timeout(600)
def test_a_request_that_never_comes_fails_those_behind_it_once_its_session_is_over(new_cluster):
    cluster = new_cluster()
    gateway, trainer = cluster.start("gateway", "trainer")
    server = cluster.server(gateway)
    sessions = [requests.new_session(server) for _ in range(2)]
    models = [requests.new_model(server, session) for session in sessions]
    waiting = [[requests.promised(server, model, seq) for seq in (1, 3, 4, 6)] for model in models]
    for ids in waiting:
        requests.raw_result(server, ids[0])
    requests.finish(server, sessions[0])
    failed = [requests.result(server, request) for request in waiting[0][1:]]
    trainer.kill()
    requests.finish(server, sessions[1])
    cluster.start("trainer")
    failed_later = [requests.result(server, request) for request in waiting[1][1:]]
    codes = [cluster.audit("log", "verify", "--all")]

    for answers in (failed, failed_later):
        assert ["request 2" in answer["error"] for answer in answers] == [True, True, False]
        assert "request 5 of this model never arrived" in answers[2]["error"]
        assert {answer["category"] for answer in answers} == {"user"}
    assert [seqs(cluster, model) for model in models] == [[0, 1, 3, 4, 6]] * 2
    assert [code for code, _ in codes] == [0], codes


@pytest.mark.timeout(600)
def test_a_request_whose_contents_are_lost_fails_by_name_and_the_next_one_runs(new_cluster):
    cluster = new_cluster()
    gateway, _ = cluster.start("gateway", "trainer")
    server = cluster.server(gateway)
    model = requests.new_model(server, requests.new_session(server))
    before = set(cluster.data.blobs.rglob("*"))
    lost = requests.promised(server, model, 3, length=1024, datums=60)
    (blob,) = (p for p in set(cluster.data.blobs.rglob("*")) - before if p.is_file())
    blob.unlink()
    others = [requests.promised(server, model, seq) for seq in (1, 2, 4)]
    failed = requests.result(server, lost)
    rest = [requests.raw_result(server, request) for request in others]
    code, said = cluster.audit("log", "verify", "--all")

    assert failed["category"] == "server"
    assert blob.parent.name + blob.name in failed["error"]
    assert not any(b"error" in raw for raw in rest)
    assert seqs(cluster, model) == [0, 1, 2, 3, 4]
    assert code == 0, said


@pytest.mark.timeout(600)
def test_a_request_that_no_trainer_serves_waits_for_one_and_is_not_called_failed(new_cluster):
    cluster = new_cluster(gateway="no_worker_timeout_s = 5")
    gateway, trainer = cluster.start("gateway", "trainer")
    server = cluster.server(gateway)
    model = requests.new_model(server, requests.new_session(server))
    trainer.kill()
    request = requests.promised(server, model, 1)
    told = []
    until(lambda: told.append(requests.why_waiting(server, request)) or len(told) == 4, "polls")
    cluster.start("trainer")

    assert set(told) == {"no trainer for model 'tiny/llama' is running; waiting for one"}
    assert b"error" not in requests.raw_result(server, request)

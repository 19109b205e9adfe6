"""Full streams, a full disk, and services that fall silent: the client waits, nothing is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fault import requests
from tests.fault.cluster import LEASE_S, last_state, let_pass, owners, records, until
from tests.integration.steps import new_model, step

from tinsmith.messages import ops, table

ROOM = 64 << 10
TRAFFIC = 48 << 20
IMPATIENT = (
    ('write_deadline: "30s"', 'write_deadline: "1s"\nping_interval: "1s"\nping_max: 2'),
    ("max_pending: 256MB", "max_pending: 8MB"),
)


def limit(cluster, stream, max_bytes=None):
    """Let ``stream`` hold no more than ``max_bytes``; None: than it holds now."""

    async def change(bus):
        js = bus._connection[1]
        info = await js.stream_info(stream)
        size = info.state.bytes if max_bytes is None else max_bytes
        await js.update_stream(info.config.evolve(max_bytes=size))

    cluster.ask(change)


def seqs(cluster, model):
    return [record.seq for record in records(cluster.log(model))]


@pytest.mark.timeout(600)
def test_a_full_queue_pushes_back_with_429_and_nothing_is_lost_or_doubled(new_cluster):
    cluster = new_cluster()
    gateway, trainer = cluster.start("gateway", "trainer")
    server = cluster.server(gateway)
    model = requests.new_model(server, requests.new_session(server))
    trainer.pause()
    limit(cluster, table.OPS.stream, ROOM)
    answers = []
    while not answers or answers[-1][0] == 200:
        answers.append(requests.post(server, model, len(answers) + 1, length=1024))
    status, headers, refusal = answers.pop()
    trainer.resume()
    last = len(answers) + 1
    until(lambda: requests.post(server, model, last, length=1024)[0] == 200, "room in the queue")
    ids = [json.loads(answer)["request_id"] for _, _, answer in answers]
    ids.append(requests.promised(server, model, last, length=1024))
    results = [requests.raw_result(server, request) for request in ids]

    assert (status, headers["Retry-After"]) == (429, "1")
    assert b"full" in refusal
    assert not any(b"error" in raw for raw in results)
    assert seqs(cluster, model) == list(range(last + 1))


@pytest.mark.timeout(600)
def test_a_full_log_stops_training_with_a_reason_and_it_goes_on_with_room(new_cluster):
    cluster = new_cluster()
    gateway, _ = cluster.start("gateway", "trainer")
    server = cluster.server(gateway)
    model = requests.new_model(server, requests.new_session(server))
    requests.raw_result(server, requests.promised(server, model, 1))
    limit(cluster, table.LOG_STREAM)
    ids = [requests.promised(server, model, seq) for seq in range(2, 8)]
    told = requests.why_waiting(server, ids[0])
    done = seqs(cluster, model)
    limit(cluster, table.LOG_STREAM, -1)
    results = [requests.raw_result(server, request) for request in ids]
    code, said = cluster.audit("log", "verify", "--all")

    assert "training waits for room" in told
    assert "full" in told
    assert done == [0, 1]
    assert not any(b"error" in raw for raw in results)
    assert seqs(cluster, model) == list(range(8))
    assert code == 0, said


@pytest.mark.timeout(600)
def test_a_broker_on_a_full_disk_delays_a_run_and_loses_nothing(new_cluster, clients, small_disk):
    cluster = new_cluster(store=small_disk / "nats")
    gateway, _ = cluster.start("gateway", "trainer")
    server = cluster.server(gateway)
    client = clients(server)
    model, alone = new_model(client), new_model(client)
    step(model)
    ballast = small_disk / "ballast"
    with ThreadPoolExecutor(1) as user:
        fill(ballast)
        losses = user.submit(lambda: [step(model) for _ in range(4)])
        until(lambda: cluster.says("no space left on device"), "the broker's complaint")
        was_done = losses.done()
        ballast.unlink()
        cluster.broker.kill()
        cluster.broker.restart()
        delayed = losses.result()
    undisturbed = [step(alone) for _ in range(5)]
    logs = [cluster.log(run.model_id) for run in (model, alone)]
    code, said = cluster.audit("log", "verify", "--all")

    assert not was_done
    assert delayed == undisturbed[1:]
    assert [[record.seq for record in records(log)] for log in logs] == [list(range(11))] * 2
    assert last_state(logs[0]) == last_state(logs[1])
    assert code == 0, said


def fill(ballast):
    """Take what is left of the disk."""
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


@pytest.mark.timeout(600)
@pytest.mark.parametrize("silent", ["gateway", "trainer"])
def test_a_service_that_the_broker_gave_up_on_connects_again_and_goes_on(
    new_cluster, clients, silent
):
    cluster = new_cluster(limits=IMPATIENT)
    nodes = dict(zip(("gateway", "trainer"), cluster.start("gateway", "trainer"), strict=True))
    client = clients(cluster.server(nodes["gateway"]))
    model, alone = new_model(client), new_model(client)
    before = [step(model)]
    nodes[silent].pause()
    with ThreadPoolExecutor(1) as user:
        losses = user.submit(lambda: [step(model) for _ in range(4)])
        cluster.ask(shout)
        until(lambda: not cluster.is_connected(nodes[silent]), "the end of patience")
        nodes[silent].resume()
        delayed = losses.result()
    until(lambda: nodes[silent].events("bus reconnected"), "the connection")
    undisturbed = [step(alone) for _ in range(5)]
    logs = [cluster.log(run.model_id) for run in (model, alone)]

    assert before + delayed == undisturbed
    assert [[record.seq for record in records(log)] for log in logs] == [list(range(11))] * 2
    assert last_state(logs[0]) == last_state(logs[1])


async def shout(bus):
    """Pings by the megabyte, of ops that nobody waits for."""
    ping = ops.OpDone(model_id="x" * (512 << 10), seq=1)
    for _ in range(TRAFFIC // (512 << 10)):
        await bus.emit(table.OP_DONE, ping)


@pytest.mark.timeout(600)
def test_a_broker_that_was_silent_for_longer_than_a_lease_leaves_models_where_they_are(
    new_cluster, clients
):
    cluster = new_cluster()
    gateway, trainer = cluster.start("gateway", "trainer")
    client = clients(cluster.server(gateway))
    model = new_model(client)
    before = [step(model)]
    cluster.broker.pause()
    let_pass(2 * LEASE_S)
    cluster.broker.resume()
    after = [step(model) for _ in range(3)]
    log = cluster.log(model.model_id)

    assert len(before + after) == 4
    assert [record.seq for record in records(log)] == list(range(9))
    assert owners(log) == [trainer.instance]

"""Each service's user at the real broker: what it may do, and that it may do nothing else."""

from __future__ import annotations

import contextlib
import json
import re
import secrets

import nats
import pytest
from tests.deploy.shipped import NATS, USERS, enter, password

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus, access, permissions
from tinsmith.bus.roles import ROLES
from tinsmith.errors import BrokerUnavailable
from tinsmith.messages import table
from tinsmith.messages.base import encode
from tinsmith.messages.checkpoints import GetCheckpoint

SERVICES = tuple(ROLES)
PATIENCE_S = 60
VERBS = (
    "STREAM.CREATE",
    "STREAM.UPDATE",
    "STREAM.DELETE",
    "STREAM.PURGE",
    "STREAM.INFO",
    "STREAM.MSG.GET",
    "STREAM.MSG.DELETE",
    "STREAM.SNAPSHOT",
    "STREAM.RESTORE",
    "STREAM.LEADER.STEPDOWN",
    "CONSUMER.LIST",
    "CONSUMER.CREATE",
    "DIRECT.GET",
)
CONSUMER_VERBS = ("CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE", "CONSUMER.MSG.NEXT")
ROWS = (*table.RPCS, *table.QUEUES, *table.EVENTS, *table.ENTITIES)
KEPT = {
    table.LOG_STREAM: table.LOG_TEMPLATE,
    table.ANCHOR_STREAM: table.ANCHOR_TEMPLATE,
    table.RESULT_STREAM: table.RESULT_TEMPLATE,
    table.SAMPLE_LOG_STREAM: table.SAMPLE_LOG_TEMPLATE,
    table.LINEAGE_STREAM: table.LINEAGE_TEMPLATE,
    table.CHUNK_STREAM: table.CHUNK_TEMPLATE,
    table.AUDIT_STREAM: table.AUDIT_TEMPLATE,
}


def concrete(template):
    """A subject of a row: something in every hole."""
    return template.wildcard.replace("*", "x1")


def everything():
    """One subject of every kind that anything in the installation is published on."""
    yield from (concrete(row) for row in (*ROWS, *KEPT.values()))
    yield from (f"$JS.API.{verb}" for verb in ("INFO", "STREAM.NAMES", "STREAM.LIST"))
    for stream in table.STREAMS:
        yield from (f"$JS.API.{verb}.{stream}" for verb in VERBS)
        yield from (f"$JS.API.{verb}.{stream}.c1" for verb in CONSUMER_VERBS)
        yield f"$JS.ACK.{stream}.c1.1.1.1.1.0"
    places = [(stream, concrete(row)) for stream, row in KEPT.items()]
    places += [(queue.stream, concrete(queue)) for queue in table.QUEUES]
    places += [(table.REGISTRY_STREAM, concrete(row)) for row in table.ENTITIES]
    for stream, subject in places:
        yield f"$JS.API.DIRECT.GET.{stream}.{subject}"
        yield f"$JS.API.CONSUMER.CREATE.{stream}.c1.{subject}"
    yield from ("$SYS.REQ.SERVER.PING", "_INBOX.x1", "tinsmith.v1.new.row", "elsewhere")
    yield from (f"{permissions.inbox_prefix(user)}.x1" for user in USERS)


def matches(pattern, subject):
    """As nats-server does it; a queue group behind the pattern is left out."""
    wanted = re.escape(pattern.partition(" ")[0]).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(wanted, subject) is not None


def lower(subjects):
    return {subject.lower() for subject in subjects}


async def publish(client, subjects):
    for subject in subjects:
        await client.publish(subject, b"\x00")
    await settled(client)


async def settled(client):
    """Until the broker has seen, and refused, what was sent: nats-py's flush overtakes it."""
    await client.request("$JS.API.STREAM.NAMES", b"", timeout=PATIENCE_S)


@contextlib.asynccontextmanager
async def connected(broker, user):
    """A bare connection, and the subjects that the broker refuses on it, in lower case."""
    refused = []

    async def on_error(error):
        refused.extend(re.findall(r'violation for \w+ to "([^"]+)"', str(error)))

    client = await nats.connect(
        broker.place, error_cb=on_error, **access.options(broker.bus_config(user))
    )
    try:
        yield client, refused
    finally:
        await client.close()


async def may_say_what_its_role_says_alone(broker, service, *, told_as=str):
    """The ``broker`` refuses all other subjects; ``told_as`` is how it calls one."""
    granted = permissions.rules(service).publish
    subjects = list(everything())
    wanted = {s for s in subjects if not any(matches(g, s) for g in granted)}
    assert len(subjects) > len(wanted) > len(subjects) / 2
    async with connected(broker, service) as (client, refused):
        await publish(client, sorted(wanted))
        assert set(refused) == lower(map(told_as, wanted))
        refused.clear()
        # Nothing of this can be read as a message; what asks JetStream for something is refused
        # by it, or reads.
        harmless = [s for s in subjects if s not in wanted and "PURGE" not in s]
        await publish(client, harmless)
        assert not refused


@pytest.mark.parametrize("service", SERVICES)
async def test_of_all_subjects_a_service_may_publish_on_those_of_its_role_alone(broker, service):
    await may_say_what_its_role_says_alone(broker, service)


@pytest.mark.parametrize("service", SERVICES)
async def test_of_all_subjects_a_service_hears_those_of_its_role_and_its_own_inbox(broker, service):
    granted = permissions.rules(service).subscribe
    subjects = [row.wildcard for row in (*ROWS, *KEPT.values())]
    subjects += [">", "tinsmith.>", "tinsmith.v1.>", "_INBOX.>", "$JS.>", "$SYS.>"]
    subjects += [f"{permissions.inbox_prefix(user)}.>" for user in USERS]
    grouped = {g.partition(" ")[0] for g in granted if " " in g}
    wanted = {s for s in subjects if s not in granted}
    async with connected(broker, service) as (client, refused):
        for subject in subjects:
            await client.subscribe(subject)
        await settled(client)
        # Those that it serves, too: it answers in the group of those who do, and listens to nobody.
        assert set(refused) == lower(wanted)
        refused.clear()
        for subject in sorted(grouped):
            await client.subscribe(subject, queue="workers")
        await settled(client)
        assert not refused


DENIED = {
    "gateway": (
        "tinsmith.v1.log.m.op.1",
        "tinsmith.v1.reg.checkpoint.c",
        "tinsmith.v1.reg.forgotten.r",
        "tinsmith.v1.done.op",
        "$JS.API.STREAM.PURGE.TS_OPS",
        "$JS.API.STREAM.DELETE.TS_LOG",
        "$JS.API.STREAM.UPDATE.TS_LOG",
        "$JS.API.CONSUMER.DURABLE.CREATE.TS_OPS.c",
        "tinsmith.v1.rpc.checkpointer.commit",
    ),
    "trainer": (
        "tinsmith.v1.result.s.1",
        "tinsmith.v1.samplelog.r.s.1",
        "tinsmith.v1.op.m.1",
        "tinsmith.v1.anchor.1",
        "tinsmith.v1.reg.apikey.k",
        "tinsmith.v1.reg.run.r",
        "$JS.API.DIRECT.GET.TS_REGISTRY.tinsmith.v1.reg.secret.links",
        "$JS.API.CONSUMER.CREATE.TS_REGISTRY.c.tinsmith.v1.reg.apikey.*",
        "$JS.API.CONSUMER.CREATE.TS_SAMPLELOG.c.tinsmith.v1.samplelog.*.*.*",
        "tinsmith.v1.rpc.checkpointer.delete",
    ),
    "sampler": (
        "tinsmith.v1.op.m.1",
        "tinsmith.v1.place.p.m",
        "tinsmith.v1.log.m.op.1",
        "tinsmith.v1.weights.l.full.1",
        "$JS.API.DIRECT.GET.TS_LOG",
        "$JS.API.DIRECT.GET.TS_LOG.tinsmith.v1.log.m.op.*",
        "$JS.API.CONSUMER.CREATE.TS_LOG.c.tinsmith.v1.log.*.*.*",
        "$JS.API.CONSUMER.CREATE.TS_REGISTRY",
        "$JS.API.DIRECT.GET.TS_REGISTRY",
        "tinsmith.v1.reg.sampler.s",
        "tinsmith.v1.reg.master.current",
    ),
    "checkpointer": (
        "tinsmith.v1.log.m.op.1",
        "tinsmith.v1.op.m.1",
        "tinsmith.v1.sample.p.s.1",
        "tinsmith.v1.result.s.1",
        "tinsmith.v1.reg.apikey.k",
        "tinsmith.v1.reg.master.current",
        "tinsmith.v1.audit.o.20260131.t",
        "$JS.API.DIRECT.GET.TS_REGISTRY.tinsmith.v1.reg.secret.links",
        "$JS.API.STREAM.MSG.DELETE.TS_LOG",
    ),
}


@pytest.mark.parametrize("service", SERVICES)
async def test_what_would_do_the_most_harm_is_refused(broker, service):
    async with connected(broker, service) as (client, refused):
        await publish(client, DENIED[service])
        assert refused == [subject.lower() for subject in DENIED[service]]


async def test_a_refused_write_reaches_nothing_and_its_caller_hears_of_it(
    broker, tmp_path, monkeypatch
):
    monkeypatch.setattr("tinsmith.bus.wire.PUBLISH_TRY_S", 0.2)
    monkeypatch.setattr("tinsmith.bus.wire.PUBLISH_PATIENCE_S", 0.2)
    blobs = BlobStore.open("", default=tmp_path)
    async with Bus.connect(broker.bus_config("sampler"), name="sampler", blobs=blobs) as bus:
        with pytest.raises(BrokerUnavailable):
            await bus.table(table.LINEAGES).delete("nobody")


async def test_a_password_of_another_user_opens_nothing(broker):
    wrong = {**access.options(broker.bus_config("sampler")), "password": password("gateway")}
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        await enter(broker.place, **wrong)


async def test_answers_go_to_inboxes_alone_whatever_the_request_says(broker, tmp_path):
    """Else who may ask the checkpointer could have it write where itself may not."""
    asked = []
    config = broker.bus_config("checkpointer")
    blobs = BlobStore.open("", default=tmp_path)

    async def on_request(request):
        asked.append(request)
        raise LookupError(request.path)

    async with (
        Bus.connect(config, name="checkpointer", blobs=blobs) as bus,
        connected(broker, "trainer") as (client, _),
        connected(broker, "operator") as (listener, _),
    ):
        heard = await listener.subscribe("tinsmith.v1.done.op")
        await settled(listener)
        await bus.serve(table.GET_CHECKPOINT, on_request)
        await bus.table(table.CHECKPOINTS).get("nothing")  # the broker has seen what came before
        subject = table.GET_CHECKPOINT.subject()
        body = encode(GetCheckpoint(path="tinker://x"))
        answer = await client.request(subject, body, timeout=60)
        assert answer.data
        await client.publish(subject, body, reply="tinsmith.v1.done.op")
        await client.request(subject, body, timeout=60)  # answered after the one before it
        await settled(listener)
        assert len(asked) == 2
        assert heard.pending_msgs == 0


RESULT = "tinsmith.v1.result.s1.1"
PLACES = {
    table.REGISTRY_STREAM: "tinsmith.v1.reg.apikey.k1",
    table.LOG_STREAM: "tinsmith.v1.log.m1.op.1",
    table.OPS.stream: "tinsmith.v1.op.m1.1",
    table.AUDIT_STREAM: "tinsmith.v1.audit.o1.20260131.t1",
}
HEARD = "tinsmith.v1.done.op"


async def consumer(client, name, **settings):
    """Of a sampler, over a result that it has written itself."""
    config = {"name": name, "filter_subject": RESULT, "ack_policy": "none", **settings}
    body = {"stream_name": table.RESULT_STREAM, "config": config}
    subject = f"$JS.API.CONSUMER.CREATE.{table.RESULT_STREAM}.{name}.{RESULT}"
    answer = await client.request(subject, json.dumps(body).encode(), timeout=PATIENCE_S)
    assert "error" not in json.loads(answer.data), answer.data


async def ask_all(client, place, tag):
    """Everything that a sampler may ask JetStream, each answered to ``place``."""
    results = table.RESULT_STREAM
    await consumer(client, f"pull-{tag}")
    asked = [
        (f"$JS.API.DIRECT.GET.{results}.{RESULT}", b""),
        (f"$JS.API.DIRECT.GET.{results}", json.dumps({"last_by_subj": RESULT}).encode()),
        ("$JS.API.STREAM.NAMES", b""),
        (f"$JS.API.CONSUMER.MSG.NEXT.{results}.pull-{tag}", b'{"batch": 1}'),
        (f"tinsmith.v1.result.s1.{tag}", b"the acknowledgement is an answer, too"),
    ]
    for subject, body in asked:
        await client.publish(subject, body, reply=place)
    return len(asked)


async def smuggle(client, operator):
    """What is in the streams of ``PLACES`` after a sampler has had all answers sent there."""
    await client.request(RESULT, b"forged", timeout=PATIENCE_S)
    run = secrets.token_hex(4)
    heard = await operator.subscribe(HEARD)
    await settled(operator)
    for number, place in enumerate((HEARD, *PLACES.values(), HEARD)):
        tag = f"{run}{number}"
        count = await ask_all(client, place, tag)
        for _ in range(count if place == HEARD else 0):
            await heard.next_msg(PATIENCE_S)  # so they are answers, and are sent
        if place != HEARD:
            await consumer(client, f"push-{tag}", deliver_subject=place)
    await heard.unsubscribe()
    found = {}
    for stream, place in PLACES.items():
        subject = f"$JS.API.DIRECT.GET.{stream}.{place}"
        answer = await operator.request(subject, b"", timeout=PATIENCE_S)
        found[stream] = (answer.headers or {}).get("Status")
    return found


async def test_no_answer_of_jetstream_gets_into_a_stream_whatever_the_request_says(broker):
    """Else who may ask it could write where itself may not: a sampler, keys and logs."""
    async with connected(broker, "sampler") as (client, refused):
        async with connected(broker, "operator") as (operator, _):
            found = await smuggle(client, operator)
        assert not refused
    assert found == dict.fromkeys(PLACES, "404")


def test_the_file_of_users_is_what_the_table_says():
    assert (NATS / "users.conf").read_text() == permissions.page()


def test_every_row_has_a_role_that_writes_it():
    written = set().union(*(permissions.rules(service).publish for service in SERVICES))
    ours = {row.wildcard for row in (*ROWS, *KEPT.values())}
    # The operator enters the master key; nobody else may.
    assert ours - written == {table.MASTER_KEYS.wildcard}

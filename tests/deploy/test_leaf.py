"""A region behind a leaf node: its services may do there what they may elsewhere, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl

import nats
import pytest
from msgspec import structs
from tests.deploy.regions import PATIENCE_S, cluster, leaf_node, links, prepare, running, until
from tests.deploy.shipped import NATS, enter, password
from tests.deploy.test_permissions import (
    PLACES,
    connected,
    everything,
    lower,
    matches,
    may_say_what_its_role_says_alone,
    settled,
    smuggle,
)

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus, access, permissions
from tinsmith.bus.permissions import API, BEHIND_A_LEAF, DOMAIN_API, REGION
from tinsmith.messages import table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub(tmp_path_factory, tls):
    """The servers of the first region, with their streams."""
    folder = tmp_path_factory.mktemp("hub")
    with cluster(folder, tls) as servers:
        asyncio.run(prepare(servers[0], folder))
        yield servers


@pytest.fixture(scope="module")
def leaf(hub, tmp_path_factory, tls):
    folder = tmp_path_factory.mktemp("region")
    with running(leaf_node(folder, tls, [server.leaf_port for server in hub])) as server:
        asyncio.run(until(lambda: links(server)))
        yield server


@pytest.fixture
def taken_over(hub, tmp_path, tls):
    """A leaf node without rules of its own."""
    ports = [hub[0].leaf_port]
    nobody_asked = ("include leaf-users.conf", "")
    with running(leaf_node(tmp_path, tls, ports, [nobody_asked], "taken-over")) as server:
        asyncio.run(until(lambda: links(server)))
        yield server


def across(subject):
    """As a leaf node passes it on."""
    return subject.replace(f"{API}.", f"{DOMAIN_API}.")


@pytest.mark.parametrize("service", BEHIND_A_LEAF)
async def test_a_service_may_say_there_what_it_may_say_elsewhere(leaf, service):
    await may_say_what_its_role_says_alone(leaf, service, told_as=across)


@pytest.mark.parametrize("service", BEHIND_A_LEAF)
async def test_a_service_hears_there_what_it_hears_elsewhere(leaf, service):
    granted = {s.partition(" ")[0] for s in permissions.rules(service).subscribe}
    subjects = [row.wildcard for row in (*table.RPCS, *table.EVENTS, *table.ENTITIES)]
    subjects += [">", "tinsmith.v1.>", "$JS.>", f"{DOMAIN_API}.>", "_INBOX_trainer.>"]
    async with connected(leaf, service) as (client, refused):
        for subject in subjects:
            await client.subscribe(subject, queue="workers" if "rpc" in subject else "")
        await settled(client)
        assert set(refused) == lower(set(subjects) - granted)


async def test_those_who_do_not_belong_there_are_not_known_there(leaf):
    for user in ("trainer", "checkpointer", "operator", REGION):
        options = {**access.options(leaf.bus_config(user))}
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await enter(leaf.place, **options)


async def test_the_user_of_leaf_nodes_is_none_for_clients(hub):
    options = access.options(hub[0].bus_config(REGION))
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        await enter(hub[0].place, **options)


@contextlib.asynccontextmanager
async def anonymous(server):
    options = {**access.options(server.bus_config("sampler")), "user": None, "password": None}
    client = await nats.connect(server.place, **options)
    try:
        yield client
    finally:
        await client.close()


async def test_a_leaf_node_that_was_taken_over_says_no_more_than_its_services(hub, taken_over):
    """What is not across by the time that the last message is, never was."""
    last = "tinsmith.v1.taken"
    granted = permissions.region().publish
    subjects = [s for s in everything() if s.startswith("tinsmith.") and s != last]
    heard = []
    async with connected(hub[1], "operator") as (listener, _), anonymous(taken_over) as client:
        done = asyncio.Event()

        async def on_message(msg):
            heard.append(msg.subject)
            if msg.subject == last:
                done.set()

        await listener.subscribe("tinsmith.v1.>", cb=on_message)
        await settled(listener)
        while not done.is_set():  # that somebody listens comes there by and by
            heard.clear()
            for subject in (*subjects, last):
                await client.publish(subject, b"\x00")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(done.wait(), 1)
    assert set(heard) - {last} == {s for s in subjects if any(matches(g, s) for g in granted)}


async def test_a_leaf_node_that_was_taken_over_hears_no_more_than_it_must(hub, taken_over):
    allowed = permissions.region().subscribe
    subjects = [row.wildcard for row in (*table.RPCS, *table.EVENTS, *table.ENTITIES)]
    subjects += [table.LOG_TEMPLATE.wildcard, table.ANCHOR_TEMPLATE.wildcard]
    secret = {s for s in subjects if not any(matches(a, s) for a in allowed)}
    assert table.LOG_TEMPLATE.wildcard in secret
    heard = []

    async def on_message(msg):
        heard.append(msg.subject)

    async with connected(hub[1], "operator") as (operator, _), anonymous(taken_over) as client:
        for subject in (*subjects, "_INBOX_trainer.>"):
            await client.subscribe(subject, cb=on_message)
        wanted = {s.replace("*", "x1") for s in set(subjects) - secret}
        while not wanted <= set(heard):
            for subject in subjects:
                await operator.publish(subject.replace("*", "x1"), b"\x00")
            await settled(operator)
            await asyncio.sleep(0)
    assert set(heard) == wanted


class Spoken:
    """The protocol of leaf nodes, spoken by one that keeps to no rule."""

    def __init__(self, reader, writer):
        self._reader = reader
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, server, *, certificate):
        context = ssl.create_default_context(cafile=server.tls.ca)
        if certificate:
            context.load_cert_chain(server.tls.cert, server.tls.key)
        streams = await asyncio.open_connection("127.0.0.1", server.leaf_port, ssl=context)
        try:
            yield cls(*streams)
        finally:
            streams[1].transport.abort()

    async def enter(self):
        """Connect as the user of leaf nodes."""
        said = {"user": REGION, "pass": password(REGION), "name": "rogue", "headers": True}
        said |= {"version": "2.15.1", "remote_account": "$G", "tls_required": True}
        return await self.say(f"CONNECT {json.dumps(said)}")

    async def say(self, *lines):
        """What is answered, up to a pong or the end."""
        self._writer.write("".join(f"{line}\r\n" for line in (*lines, "PING")).encode())
        answered = b""
        async with asyncio.timeout(PATIENCE_S):
            while line := await self._reader.readline():
                answered += line
                if line.startswith(b"PONG"):
                    break
        return answered.decode()


async def test_without_a_certificate_nobody_connects_as_a_leaf_node(hub):
    answered = ""
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        async with Spoken.to(hub[0], certificate=False) as rogue:
            answered = await rogue.enter()
    assert "PONG" not in answered


@pytest.mark.parametrize(
    "subject",
    [
        "tinsmith.v1.log.m.op.1",
        f"{DOMAIN_API}.STREAM.DELETE.TS_LOG",
        f"{API}.STREAM.DELETE.TS_LOG",
        f"{API}.STREAM.NAMES",
        "_INBOX_trainer.x",
    ],
)
async def test_who_passes_on_what_may_not_be_said_is_thrown_out(hub, subject):
    async with Spoken.to(hub[0], certificate=True) as rogue:
        assert "PONG" in await rogue.enter()
        assert "ERR" not in await rogue.say("LMSG tinsmith.v1.taken 1", "x")
        answer = await rogue.say(f"LMSG {subject} 1", "x")
        assert "Permissions Violation for Publish" in answer
        assert "PONG" not in answer


async def test_of_two_leaf_nodes_one_may_fail(hub, leaf, tmp_path, tls):
    config = leaf.bus_config("sampler", replicas=3)
    blobs = BlobStore.open("", default=tmp_path)
    with running(leaf_node(tmp_path, tls, [hub[2].leaf_port], name="other")) as other:
        await until(lambda: links(other))
        config = structs.replace(config, url=f"{other.place},{leaf.place}")
        async with Bus.connect(config, name="sampler", blobs=blobs) as bus:
            await bus.table(table.SERVED).get("tiny")
            other.kill()
            assert await bus.table(table.SERVED).get("tiny") is None
            assert bus._client.connected_url.netloc == leaf.place.removeprefix("tls://")


@pytest.mark.parametrize("place", ["nats-0", "nats-1", "nats-2", "leaf"])
async def test_no_answer_of_jetstream_gets_into_a_stream_from_anywhere(hub, leaf, place):
    """Wherever the streams' leaders are, and whoever passes the answers on."""
    server = {**{f"nats-{n}": one for n, one in enumerate(hub)}, "leaf": leaf}[place]
    async with connected(server, "sampler") as (client, refused):
        async with connected(hub[0], "operator") as (operator, _):
            found = await smuggle(client, operator)
        assert not refused
    assert found == dict.fromkeys(PLACES, "404")


def test_the_file_of_users_is_what_the_table_says():
    assert (NATS / "leaf-users.conf").read_text() == permissions.leaf_page()

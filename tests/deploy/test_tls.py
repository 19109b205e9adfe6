"""TLS to the broker, within its cluster, at the gateway; and nothing is said to anybody else."""

from __future__ import annotations

import asyncio
import ssl

import nats
import pytest
from msgspec import structs
from tests.deploy import authority
from tests.deploy.regions import answered, cluster
from tests.deploy.shipped import ShippedBroker, enter, password

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus, access
from tinsmith.errors import BrokerUnavailable, ConfigError
from tinsmith.messages import table
from tinsmith.messages.registry import ServedModel
from tinsmith_gateway.certificate import tls_context
from tinsmith_gateway.config import GatewayConfig

# nats-py leaves connections behind that were refused.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def connecting(config, folder):
    blobs = BlobStore.open("", default=folder / "blobs")
    return Bus.connect(config, name=config.user, blobs=blobs)


async def test_a_broker_that_another_authority_vouches_for_is_refused(broker, tmp_path):
    other = authority.issue(tmp_path / "other")
    config = broker.bus_config("sampler", tls_ca=str(other.ca), connect_timeout_s=20.0)
    with pytest.raises(BrokerUnavailable):
        async with connecting(config, tmp_path):
            pass


async def test_the_broker_refuses_whoever_speaks_in_clear(broker):
    in_clear = broker.place.replace("tls://", "nats://")
    with pytest.raises((nats.errors.Error, OSError, asyncio.TimeoutError)):
        await enter(in_clear, user="sampler", password=password("sampler"), connect_timeout=5)


async def test_who_stands_between_and_says_that_there_is_no_tls_hears_no_password(
    tmp_path, tls, broker
):
    heard = bytearray()

    async def in_between(reader, writer):
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1024}\r\n')
        while data := await reader.read(1024):
            heard.extend(data)
        writer.close()

    server = await asyncio.start_server(in_between, "127.0.0.1", 0)
    async with server:
        url = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        config = broker.bus_config("sampler", url=url, connect_timeout_s=20.0)
        with pytest.raises(BrokerUnavailable):
            async with connecting(config, tmp_path):
                pass
    assert heard  # it did try
    assert b"CONNECT" not in heard
    assert password("sampler").encode() not in heard


@pytest.mark.parametrize("key", ["tls_ca", "tls_cert", "password_file"])
def test_a_file_that_cannot_be_used_is_named(broker, tmp_path, key):
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=f"{key}.*missing"):
        access.options(broker.bus_config("sampler", **{key: missing}))


async def test_a_server_may_ask_for_certificates_of_clients(tmp_path, tls):
    asks = (
        "handshake_first: true",
        "handshake_first: true\n  verify: true\n  ca_file: $NATS_TLS_CA",
    )
    strict = ShippedBroker("single.conf", tmp_path, tls, changes=[asks])
    strict.start()
    try:
        mine = {"tls_cert": str(tls.cert), "tls_key": str(tls.key)}
        async with connecting(strict.bus_config("operator", **mine), tmp_path) as bus:
            await bus.ensure()
        without = strict.bus_config("operator", connect_timeout_s=20.0)
        with pytest.raises(BrokerUnavailable):
            async with connecting(without, tmp_path):
                pass
    finally:
        strict.kill()


async def ensured(broker, folder):
    async with connecting(broker.bus_config("operator"), folder) as bus:
        await bus.ensure()


SERVED = ServedModel(
    name="tiny", role="sampler", vocab_size=8, context_length=8, tokenizer_id="tiny"
)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_servers_have_every_stream_and_one_may_die(tmp_path, tls):
    with cluster(tmp_path, tls) as servers:
        await answered(lambda: ensured(servers[1], tmp_path))
        async with connecting(servers[1].bus_config("operator"), tmp_path) as bus:
            found = await bus._connection[1].streams_info()
        assert {info.config.num_replicas for info in found} == {3}
        assert len(found) == len(table.STREAMS)

        far = servers[0].bus_config("sampler")
        near = servers[1].bus_config("gateway")
        async with connecting(far, tmp_path) as sampler, connecting(near, tmp_path) as gateway:
            await answered(sampler.ensure)  # it only looks whether they are there
            await sampler.table(table.SERVED).put("tiny", SERVED)
            assert await gateway.table(table.SERVED).get("tiny") == SERVED

            servers[2].kill()
            changed = structs.replace(SERVED, context_length=16)
            await sampler.table(table.SERVED).put("tiny", changed)
            assert await gateway.table(table.SERVED).get("tiny") == changed


def test_a_gateway_answers_over_https_with_its_certificate(tls):
    context = tls_context(GatewayConfig(tls_cert=str(tls.cert), tls_key=str(tls.key)))
    assert context is not None
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert tls_context(GatewayConfig()) is None


def test_a_certificate_of_the_gateway_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tls_cert = '.*absent"):
        tls_context(GatewayConfig(tls_cert=str(tmp_path / "absent")))

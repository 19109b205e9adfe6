"""The broker of one machine: the real nats-server, killed, paused, restarted."""

from __future__ import annotations

import json
import socket
import urllib.request

import pytest

from tinsmith.broker import Broker
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.errors import BrokerUnavailable, StartupError

pytestmark = pytest.mark.integration


def variables(broker):
    with urllib.request.urlopen(f"{broker.monitoring_url}/varz", timeout=5) as answer:
        return json.load(answer)


def test_what_it_acknowledges_is_on_the_disk(broker):
    assert variables(broker)["jetstream"]["config"]["sync_always"] is True


def test_large_messages_pass(broker):
    assert variables(broker)["max_payload"] == 8 << 20


def test_it_listens_on_the_loopback_address_only(broker):
    assert variables(broker)["host"] == "127.0.0.1"


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_restart_keeps_the_address(broker, end):
    before = broker.url, broker.pid
    getattr(broker, end)()
    assert not broker.is_running

    broker.restart()

    assert broker.url == before[0]
    assert broker.pid != before[1]


def test_only_its_owner_can_read_the_token(broker, tmp_path):
    written = tmp_path / "data" / "run" / "nats.conf"

    assert broker.url.partition("@")[0].removeprefix("nats://") in written.read_text()
    assert written.stat().st_mode & 0o777 == 0o600


def test_a_paused_server_is_silent_and_a_resumed_one_answers(broker):
    broker.pause()
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(f"{broker.monitoring_url}/varz", timeout=0.3)
    broker.resume()

    assert variables(broker)["host"] == "127.0.0.1"


def test_a_server_that_does_not_stop_is_killed(broker):
    broker.pause()

    assert broker.stop(patience_s=0.2) is False
    assert not broker.is_running


def test_a_taken_port_is_refused_before_the_start(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Broker(tmp_path / "nats", tmp_path / "run", port=port)

        with pytest.raises(StartupError, match=rf"port {port} cannot be used"):
            server.start()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")

    with pytest.raises(StartupError, match=r"run/nats\.conf cannot be written"):
        Broker(tmp_path / "nats", tmp_path / "run").start()


def test_a_server_that_ends_at_its_start_says_where_its_log_is(tmp_path):
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "jetstream").write_text("a file where a folder should be")

    with pytest.raises(StartupError, match=r"ended with code 1 at its start; see .*nats\.log"):
        Broker(tmp_path / "nats", tmp_path / "run").start()


async def test_a_client_without_the_token_is_refused(broker, blobs):
    bare = "nats://" + broker.url.partition("@")[2]

    with pytest.raises(BrokerUnavailable):
        async with Bus.connect(BusConfig(url=bare, connect_timeout_s=1), name="x", blobs=blobs):
            pass

from __future__ import annotations

import socket
import threading

import pytest

from tinsmith.cli import reach


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_a_server_that_accepts_is_reachable(server):
    assert (
        reach.unreachable(f"nats://tok@127.0.0.1:{server.getsockname()[1]}", default_port=1) == ""
    )


def test_the_scheme_has_a_default_port(server):
    assert reach.unreachable("nats://127.0.0.1", default_port=server.getsockname()[1]) == ""


def test_a_refusal_is_told(server):
    port = server.getsockname()[1]
    server.close()

    reason = reach.unreachable(f"nats://127.0.0.1:{port}", default_port=1)

    assert reason == "127.0.0.1 cannot be reached: Connection refused"


def test_an_unknown_name_is_told():
    assert "no-such-host.invalid cannot be reached" in reach.unreachable(
        "nats://no-such-host.invalid", default_port=1
    )


def test_silence_is_not_waited_for(monkeypatch):
    released = threading.Event()

    def silent(*_, **__):
        released.wait()
        raise OSError("too late")

    monkeypatch.setattr(reach, "REACH_S", 0.1)
    monkeypatch.setattr(socket, "create_connection", silent)
    try:
        assert reach.unreachable("http://10.0.0.1", default_port=1) == "10.0.0.1 does not answer"
    finally:
        released.set()

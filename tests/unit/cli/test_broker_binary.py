from __future__ import annotations

import pytest

from tinsmith import broker
from tinsmith.errors import StartupError


def script(path, output, code=0):
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_the_binary_from_the_package_index_is_found_without_a_path():
    found = broker.find_binary({"PATH": ""})

    assert found.name == "nats-server"
    assert broker.check_version(found) >= broker.MINIMUM_VERSION


def test_the_named_binary_wins(tmp_path):
    named = script(tmp_path / "mine", "nats-server: v2.14.1")

    assert broker.find_binary({broker.BINARY_VARIABLE: str(named)}) == named


def test_a_named_binary_that_is_absent_is_refused(tmp_path):
    with pytest.raises(StartupError, match=r"NATS_SERVER_BIN: .*absent is not an executable"):
        broker.find_binary({broker.BINARY_VARIABLE: str(tmp_path / "absent")})


def test_an_old_server_is_refused_with_version_path_and_remedy(tmp_path):
    old = script(tmp_path / "nats-server", "nats-server: v2.9.10")

    with pytest.raises(StartupError) as caught:
        broker.check_version(old)

    for part in ("2.9.10", str(old), "2.12 or newer", "tinsmith[broker]"):
        assert part in str(caught.value)


def test_a_program_that_is_no_nats_server_is_refused(tmp_path):
    with pytest.raises(StartupError, match="does not say its version: 'hello'"):
        broker.check_version(script(tmp_path / "x", "hello"))


def test_a_binary_that_fails_is_refused(tmp_path):
    with pytest.raises(StartupError, match="cannot be run"):
        broker.check_version(script(tmp_path / "x", "", code=1))


def test_without_any_binary_the_remedies_are_named(monkeypatch):
    monkeypatch.setattr(broker.importlib.metadata, "files", lambda _: None)
    monkeypatch.setattr(broker.sysconfig, "get_path", lambda _: "/nowhere")

    with pytest.raises(StartupError, match=r"no nats-server found; .*TINSMITH_NATS_URL"):
        broker.find_binary({"PATH": ""})

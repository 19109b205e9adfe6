"""API keys: which are taken, whose they are, and where they come from."""

from __future__ import annotations

import pytest

from tinsmith.errors import ConfigError, StartupError, Unauthorized
from tinsmith_gateway.auth import Keyring, owner_of, read_keys
from tinsmith_gateway.config import GatewayConfig


def test_each_key_has_an_owner_of_its_own():
    ring = Keyring(["tml-a", "tml-b"])

    assert ring.owner("tml-a") == ring.owner("tml-a") != ring.owner("tml-b")


def test_an_owner_does_not_give_the_key_away():
    assert "secret" not in owner_of("tml-secret")


@pytest.mark.parametrize("presented", [None, "", "tml-", "tml-A", "tml-a ", "tml-\udcff"])
def test_anything_else_is_unauthorized(presented):
    with pytest.raises(Unauthorized, match="X-API-Key"):
        Keyring(["tml-a"]).owner(presented)


def test_keys_come_from_the_configuration_and_from_the_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# team\ntml-b  # bob\n\ntml-c\n")
    config = GatewayConfig(api_keys=("tml-a",), api_key_file=str(file))

    assert read_keys(config, tmp_path / "absent") == ("tml-a", "tml-b", "tml-c")


def test_the_generated_key_is_used_when_none_is_configured(tmp_path):
    default = tmp_path / "api-key"
    default.write_text("tml-generated\n")

    assert read_keys(GatewayConfig(), default) == ("tml-generated",)


def test_the_generated_key_is_not_used_beside_configured_ones(tmp_path):
    default = tmp_path / "api-key"
    default.write_text("tml-generated\n")

    assert read_keys(GatewayConfig(api_keys=("tml-a",)), default) == ("tml-a",)


def test_a_gateway_without_any_key_does_not_start(tmp_path):
    with pytest.raises(StartupError, match=r"gateway.api_keys"):
        read_keys(GatewayConfig(), tmp_path / "absent")


@pytest.mark.parametrize("key", ["secret", "tml-", "tml-\n"])
def test_a_key_that_no_client_can_send_is_named_by_its_number_only(tmp_path, key):
    with pytest.raises(ConfigError, match="key number 2") as caught:
        read_keys(GatewayConfig(api_keys=("tml-a", key)), tmp_path / "absent")

    assert "secret" not in str(caught.value)


def test_a_key_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        read_keys(GatewayConfig(api_key_file=str(tmp_path / "absent")), tmp_path / "x")

from __future__ import annotations

import socket

import pytest
from huggingface_hub import constants

from tinsmith.cli import model_check
from tinsmith.config import DEFAULT_MODEL, ModelConfig
from tinsmith.errors import StartupError


@pytest.fixture
def online(monkeypatch, tmp_path):
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        yield hub


def test_a_model_in_a_folder_is_at_hand(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    model_check.check(ModelConfig(name="m", path=str(tmp_path)))


def test_a_model_in_the_hubs_cache_is_at_hand_offline(online, monkeypatch, tmp_path):
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    model_check.check(ModelConfig(name="org/m"))


def test_a_model_that_the_hub_may_have_passes(online):
    model_check.check(ModelConfig(name="org/m"))


def test_offline_an_absent_model_is_refused_at_once(online, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(StartupError, match=r"'org/m': .* HF_HUB_OFFLINE is set; set path"):
        model_check.check(ModelConfig(name="org/m"))


def test_the_default_model_has_one_more_way(online, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(StartupError, match="or run 'tinsmith demo', which fetches it"):
        model_check.check(ModelConfig(name=DEFAULT_MODEL))


def test_without_a_hub_an_absent_model_is_refused_at_once(online):
    online.close()

    with pytest.raises(StartupError, match=r"'org/m': .*127\.0\.0\.1 cannot be reached"):
        model_check.check(ModelConfig(name="org/m"))


def test_behind_a_proxy_the_hub_is_believed_to_be_there(online, monkeypatch):
    online.close()
    monkeypatch.setenv("https_proxy", "http://proxy:3128")

    model_check.check(ModelConfig(name="org/m"))

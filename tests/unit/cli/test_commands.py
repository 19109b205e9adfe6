from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from tinsmith import __version__
from tinsmith.cli import foreground
from tinsmith.errors import StartupError

HEAVY = ("torch", "nats", "aiohttp", "numpy", "obstore", "transformers", "uvloop", "structlog")
COMMANDS = (
    "up", "gateway", "trainer", "sampler", "checkpointer", "demo", "replay", "config", "version",
)  # fmt: skip


def tinsmith(*args, **environ):
    command = [sys.executable, "-P", "-m", "tinsmith", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, env=environ, check=False
    )


def test_help_lists_every_command_and_the_exit_codes():
    shown = tinsmith("--help")

    assert shown.returncode == 0
    for word in (*COMMANDS, "Exit codes"):
        assert word in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    shown = tinsmith(command, "--help")

    assert shown.returncode == 0
    assert f"Usage: tinsmith {command}" in shown.stdout


def test_help_imports_nothing_heavy():
    code = f"import sys, tinsmith.cli; print([m for m in {HEAVY} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.strip() == "[]"


def test_version():
    assert tinsmith("version").stdout == f"tinsmith {__version__}\n"


def test_config_show_prints_what_the_environment_says():
    shown = tinsmith("config", "show", HOME="/home/x", TINSMITH_GATEWAY__PORT="8123")

    assert shown.returncode == 0
    assert "port = 8123  # TINSMITH_GATEWAY__PORT" in shown.stdout


@pytest.mark.parametrize("command", [("config", "show"), ("up",), ("gateway",)])
def test_a_misspelt_key_is_one_line_and_exit_code_2(command):
    shown = tinsmith(*command, HOME="/home/x", TINSMITH_GATEWAY__PROT="8123")

    assert shown.returncode == 2
    assert shown.stderr.startswith(f"tinsmith {' '.join(command)}: error: TINSMITH_GATEWAY__PROT: ")
    assert shown.stderr.count("\n") == 1


def test_an_unknown_service_names_the_right_one():
    shown = tinsmith("up", "--services", "gatewai", HOME="/home/x")

    assert shown.returncode == 2
    assert "did you mean 'gateway'?" in shown.stderr


def test_an_unknown_option_is_exit_code_2():
    assert tinsmith("up", "--prot", "1").returncode == 2


def test_installed_extras_are_recognised():
    foreground.require_extra("gateway")


def test_a_missing_extra_is_named_with_the_remedy(monkeypatch):
    requirements = ["absent-package>=2; extra == 'trainer'", "numpy>=2"]
    monkeypatch.setattr(metadata, "requires", lambda _: requirements)

    with pytest.raises(StartupError, match=r"absent-package .*pip install 'tinsmith\[trainer\]'"):
        foreground.require_extra("trainer")
    foreground.require_extra("gateway")

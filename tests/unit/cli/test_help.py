"""What every command says of itself, at once, and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tinsmith.cli.app import app
from tinsmith.cli.describe import page

HEAVY = (
    "torch", "nats", "aiohttp", "numpy", "obstore", "transformers", "uvloop", "structlog",
    "msgspec",
)  # fmt: skip
SHOW_ALL = """
import contextlib, io, sys
from typer.main import get_command
from tinsmith.cli.app import app
def walk(command, path):
    yield path
    for name, one in getattr(command, "commands", {}).items():
        yield from walk(one, [*path, name])
root = get_command(app)
for path in walk(root, []):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        root([*path, "--help"], prog_name="tinsmith")
    assert "Usage: tinsmith" in shown.getvalue(), path
print([name for name in sys.argv[1:] if name in sys.modules])
"""


def walk(command, path=()):
    below = getattr(command, "commands", {})
    if not below or command.callback is not None:
        yield path, command
    for name, one in below.items():
        yield from walk(one, (*path, name))


COMMANDS = {" ".join(path): command for path, command in walk(get_command(app)) if path}


def tinsmith(*args, **environ):
    command = [sys.executable, "-P", "-m", "tinsmith", *args]
    environ = {"PATH": os.environ["PATH"], "HOME": "/nowhere", **environ}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environ, check=False
    )


def test_no_help_imports_anything_heavy():
    shown = subprocess.run(
        [sys.executable, "-c", SHOW_ALL, *HEAVY], capture_output=True, text=True, check=True
    )

    assert shown.stdout == "[]\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_an_example_and_its_exit_codes(name):
    told = f"{COMMANDS[name].help}\n{COMMANDS[name].epilog}"

    assert "Example" in told
    assert f"tinsmith {name}" in told
    assert "Exit codes:" in told


@pytest.mark.parametrize("group", ["", "log", "keys", "runs", "config"])
def test_no_line_about_a_command_is_cut_off_on_a_narrow_terminal(group):
    root = get_command(app)
    command = root.commands[group] if group else root
    with command.make_context(group or "tinsmith", [], resilient_parsing=True) as context:
        context.terminal_width = 80
        shown = command.get_help(context)

    assert "Commands:" in shown
    assert [line for line in shown.splitlines()[1:] if line.endswith("...")] == []


def test_completion_of_commands():
    shown = tinsmith(_TINSMITH_COMPLETE="complete_bash", COMP_WORDS="tinsmith sta", COMP_CWORD="1")

    assert shown.stdout.split() == ["status"]


def test_completion_is_shown_for_a_shell():
    shown = tinsmith("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")

    assert "complete -o default -F _tinsmith_completion tinsmith" in shown.stdout


def test_the_page_of_commands_is_current():
    recorded = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()

    assert recorded == page(), "run: python -m tinsmith.cli.describe > docs/cli.md"

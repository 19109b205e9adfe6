"""The exit codes of ``tinsmith replay``: what broke must not look like what was found."""

from __future__ import annotations

import pytest

from tinsmith.cli import replay
from tinsmith.errors import InvalidRequest


@pytest.mark.parametrize(
    "error", [InvalidRequest("x"), ZeroDivisionError("x"), KeyboardInterrupt()]
)
def test_whatever_goes_wrong_is_exit_code_2(monkeypatch, capsys, error):
    def fail(options):
        raise error

    monkeypatch.setattr(replay, "_run", fail)

    assert replay.run(replay.Options(target="x")) == 2
    assert capsys.readouterr().err


def test_a_wrong_configuration_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("TINSMITH_TRAINER__THREDS", "1")

    assert replay.run(replay.Options(target="x")) == 2
    assert capsys.readouterr().err.startswith("tinsmith replay: error: TINSMITH_TRAINER__THREDS")


def test_what_a_log_says_in_an_error_cannot_steer_a_terminal(monkeypatch, capsys):
    def fail(options):
        raise InvalidRequest("run: \x1b[2J")

    monkeypatch.setattr(replay, "_run", fail)
    replay.run(replay.Options(target="x"))

    assert "\x1b" not in capsys.readouterr().err

"""What ``tinsmith doctor`` does."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from tinsmith import logs
from tinsmith.cli.looking import FOUND, OK, load
from tinsmith.cli.tables import BAD, FAINT, GOOD, console
from tinsmith.config import LogsConfig
from tinsmith.doctor.examination import examine
from tinsmith.doctor.finding import Finding, Subject, fail, ok
from tinsmith.errors import ConfigError
from tinsmith.logbook.text import plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STYLES = {"ok": GOOD, "warn": "yellow", "fail": BAD}
MAX_CHARS = 1000


def run(path: Path | None, data_dir: Path | None, *, is_json: bool) -> int:
    """The exit code: 1 when a check failed."""
    found = []
    logs.configure(LogsConfig(level="error"), service="doctor", instance="doctor")
    for finding in _findings(path, data_dir):
        found.append(finding)
        if not is_json:
            show(finding)
    if is_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    code = FOUND if any(finding.level == "fail" for finding in found) else OK
    sys.stdout.flush()
    if any(thread.name.startswith("check ") for thread in threading.enumerate()):
        os._exit(code)  # a check that hangs must not hold us at our end
    return code


def _findings(path: Path | None, data_dir: Path | None) -> Iterator[Finding]:
    """Without a configuration nothing else can be told."""
    try:
        loaded = load(path, data_dir)
    except ConfigError as error:
        yield fail("configuration", str(error), "correct it; 'tinsmith config show --docs' helps")
        return
    yield ok("configuration", str(loaded.path) if loaded.path else "defaults and environment")
    yield from examine(Subject(loaded, os.environ))


def show(finding: Finding) -> None:
    """A line, and below it what to do."""
    out = console()
    level, style = finding.level.ljust(4), STYLES[finding.level]
    says = plain(finding.says, MAX_CHARS)
    out.print(Text.assemble((level, style), "  ", (finding.check, "bold"), "  ", says))
    if finding.remedy:
        out.print(Text.assemble("      ", (f"-> {plain(finding.remedy, MAX_CHARS)}", FAINT)))

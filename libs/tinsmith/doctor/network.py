"""Checks of addresses: whether what is to be listened on is free, or ours already."""

from __future__ import annotations

import json
import urllib.parse
from typing import TYPE_CHECKING

from tinsmith import listening
from tinsmith.doctor.finding import fail, ok
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.doctor.finding import Finding, Subject


def ports(subject: Subject) -> Finding:
    """The gateway's, and those for metrics."""
    ours = set(_ours(subject))
    told, taken = [], []
    for section, host, port in _wanted(subject):
        if port == 0:
            told.append(f"{section}: any")
        elif port in ours:
            told.append(f"{section}: {port}, in use by this installation")
        elif why := _why_not(section, host, port):
            taken.append(why)
        else:
            told.append(f"{section}: {port} is free")
    if taken:
        return fail("ports", taken[0], "stop what has it, or choose another port")
    return ok("ports", "; ".join(told))


def _wanted(subject: Subject) -> Iterator[tuple[str, str, int]]:
    yield (
        "gateway",
        str(subject.setting("gateway", "host")),
        int(subject.setting("gateway", "port")),
    )
    if subject.setting("metrics", "enabled") and (port := int(subject.setting("metrics", "port"))):
        host = str(subject.setting("metrics", "host"))
        for n in range(_processes(subject)):
            yield "metrics", host, port + n


def _processes(subject: Subject) -> int:
    """How many services one ``tinsmith up`` starts; each has a port for its metrics."""
    models = subject.config.models
    whole = sum(model.full for model in models)
    return int(subject.setting("gateway", "workers")) + 1 + 2 * len(models) + whole


def _why_not(section: str, host: str, port: int) -> str:
    try:
        listening.bind(host, port, section=section).close()
    except StartupError as error:
        return str(error)
    return ""


def _ours(subject: Subject) -> Iterator[int]:
    """Ports that the ``tinsmith up`` of the data folder listens on."""
    try:
        told = json.loads(subject.data.up_file.read_text())
    except (OSError, ValueError):
        return
    for url in (told.get("base_url", ""), *told.get("metrics", {}).values()):
        if port := urllib.parse.urlsplit(str(url)).port:
            yield port

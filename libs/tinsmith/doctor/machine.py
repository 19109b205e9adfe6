"""Checks of the machine: Python, packages, cores, memory, disk."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from tinsmith import memory, paths
from tinsmith.doctor.finding import fail, ok, warn
from tinsmith.logbook.text import size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinsmith.doctor.finding import Finding, Subject

PYTHON = (3, 11)
SERVICES = ("gateway", "trainer", "sampler", "checkpointer")
ROOMY_BYTES = 10 << 30
"""Of disk: a run's log and its checkpoints grow."""
_REQUIREMENT = re.compile(r"([\w.-]+)([^;]*)(?:;\s*extra == ['\"]([\w-]+)['\"])?$")


def python(_: Subject) -> Finding:
    """The interpreter."""
    told = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON:
        return fail("python", told, "install Python 3.11 or newer, and tinsmith with it")
    return ok("python", told)


def packages(_: Subject) -> Finding:
    """What tinsmith itself and each service need, by the installed packages' own word."""
    wrong = {extra: list(_lacking(extra)) for extra in ("", *SERVICES)}
    if wrong[""]:
        return fail("packages", "; ".join(wrong[""]), "pip install --upgrade tinsmith")
    lacking = {extra: why for extra, why in wrong.items() if why}
    if not lacking:
        return ok("packages", "all that the services need")
    told = "; ".join(f"{extra}: {', '.join(why)}" for extra, why in lacking.items())
    return warn(
        "packages",
        f"these services cannot run here ({told})",
        f"where they are to run: pip install 'tinsmith[{','.join(lacking)}]'",
    )


def _lacking(extra: str) -> Iterator[str]:
    for requirement in metadata.requires("tinsmith") or ():
        match = _REQUIREMENT.match(requirement.strip())
        if match is None or (match[3] or "") != extra:  # None: for other Pythons or platforms
            continue
        name, least = match[1], re.search(r">=\s*([\d.]+)", match[2])
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield f"{name} is not installed"
            continue
        if least is not None and numbers(found) < numbers(least[1]):
            yield f"{name} is {found}, and {least[1]} or newer is needed"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.8.0+cpu`` is (2, 8, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def cores(subject: Subject) -> Finding:
    """How many there are, and how many threads are asked for."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = sum(int(subject.setting(service, "threads")) for service in ("trainer", "sampler"))
    if count is not None and wanted > count:
        return warn(
            "cores",
            f"{count}, and trainer.threads and sampler.threads are {wanted} together",
            "lower them: more threads than free cores are slower than fewer",
        )
    return ok("cores", str(count))


def main_memory(subject: Subject) -> Finding:
    """Whether the weights of all models fit, those that are held on a CPU."""
    free = memory.available_bytes()
    if free is None:
        return ok("memory", "this system does not tell how much is free")
    told = f"{size(free)} free"
    if subject.is_up:
        return ok("memory", f"{told} beside what runs")
    each = {
        model.name: state.files.weight_bytes(model.dtype, model.quantization)
        for model, state in subject.models
        if state.files is not None and subject.setting("trainer", "device", model) != "cuda"
    }
    needed = 2 * sum(each.values())
    if each and max(each.values()) > free:
        name = max(each, key=lambda name: each[name])
        return fail(
            "memory",
            f"{told}, and the weights of {name} alone are {size(each[name])}",
            'without a GPU: dtype = "bfloat16", quantization = "nf4", or a smaller model',
        )
    if needed > free:
        return warn(
            "memory",
            f"{told}, and weights take {size(needed)}, once for each trainer and sampler",
            "without a GPU: run them on several machines, or serve fewer or smaller models",
        )
    return ok("memory", f"{told}; weights take {size(needed)} on a CPU" if each else told)


def disk(subject: Subject) -> Finding:
    """Whether the data folder can be written, and has room."""
    root = subject.data.root
    there = existing(root)
    if not os.access(there, os.W_OK | os.X_OK):
        return fail(
            "disk", f"{there} cannot be written", "fix its permissions, or set data_dir elsewhere"
        )
    free = shutil.disk_usage(there).free
    told = f"{size(free)} free at {root}"
    if free < paths.MIN_FREE_BYTES:
        return fail("disk", told, "free space, or set data_dir elsewhere; nothing starts like this")
    if free < ROOMY_BYTES:
        return warn(
            "disk", told, "logs and checkpoints grow: free space, or set data_dir elsewhere"
        )
    return ok("disk", told)


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    return path if path.exists() else next(one for one in path.parents if one.exists())

"""Checks of the GPUs, by ``nvidia-smi``: no library of theirs is loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.doctor.finding import fail, ok, warn
from tinsmith.doctor.machine import numbers
from tinsmith.logbook.text import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.doctor.finding import Finding, Subject

ASK_S = 10.0
DRIVERS = {12: 525, 13: 580}
"""CUDA's major version -> the oldest driver that it runs on."""
_FIELDS = "name,driver_version,memory.total,memory.free"
_MIB = 1 << 20


class Gpu(NamedTuple):
    """One of them."""

    name: str
    driver: str
    total: int  # bytes
    free: int


def gpu(subject: Subject) -> Finding:
    """Whether there is one where one is asked for, with a driver and memory that will do."""
    wanted = [
        f"{service}.device"
        for service in ("trainer", "sampler")
        if any(subject.setting(service, "device", model) == "cuda" for model, _ in subject.models)
    ]
    found, why = look()
    if not found and wanted:
        return fail(
            "gpu",
            f"{' and '.join(wanted)} ask for one, and {why}",
            "install NVIDIA's driver until nvidia-smi lists the GPU, or set device to auto or cpu",
        )
    if not found:
        return ok("gpu", f"{why}; models are computed on the CPU")
    return _judged(subject, found)


def _judged(subject: Subject, found: Sequence[Gpu]) -> Finding:
    told = ", ".join(f"{one.name} ({size(one.free)} of {size(one.total)} free)" for one in found)
    told = f"{told}, driver {found[0].driver}"
    torch, cuda = torch_build()
    if torch.endswith("+cpu"):
        return warn(
            "gpu",
            f"{told}; torch {torch} cannot use it",
            "install a torch that is built for CUDA: https://pytorch.org/get-started",
        )
    least = DRIVERS.get(cuda or 0, 0)
    if least and numbers(found[0].driver) < (least,):
        return fail(
            "gpu",
            f"{told}; CUDA {cuda}, which torch {torch} has, needs driver {least} or newer",
            "update NVIDIA's driver, or install a torch for an older CUDA",
        )
    largest = max(one.total for one in found)
    for model, state in subject.models:
        files = state.files
        if files is None or subject.setting("trainer", "device", model) == "cpu":
            continue
        weights, ranks = files.weight_bytes(model.dtype, model.quantization), 1
        if subject.setting("trainer", "sharding", model) == "weights":
            ranks = int(subject.setting("trainer", "ranks", model))
        if weights // ranks > largest:
            return fail(
                "gpu",
                f"{told}; the weights of {model.name} are {size(weights // ranks)}",
                'set dtype = "bfloat16" or quantization = "nf4", or serve a smaller model',
            )
        gradient = weights if ranks > 1 else 0  # of a pass, beside the slices of their sum
        need = weights + gradient + files.state_bytes(ranks)
        if model.full and need > largest:
            return fail(
                "gpu",
                f"{told}; training all weights of {model.name} takes {size(need)}",
                'set dtype = "bfloat16", share it among more ranks (trainer.sharding = "weights"), '
                "or leave out full = true",
            )
    return ok("gpu", told)


def look() -> tuple[list[Gpu], str]:
    """What nvidia-smi lists; why there is nothing."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [], "there is no nvidia-smi"
    ask = [command, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer ({type(error).__name__})"
    if said.returncode:
        return [], f"nvidia-smi fails: {(said.stdout or said.stderr).strip()[:200]}"
    found = parse(said.stdout)
    return found, "" if found else "nvidia-smi lists none"


def parse(text: str) -> list[Gpu]:
    """The lines of ``--query-gpu``; a GPU that shares main memory tells no figures of its own."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            name, driver, total, free = parts
            found.append(Gpu(name, driver, _mebibytes(total), _mebibytes(free)))
    return found


def _mebibytes(text: str) -> int:
    return int(text) * _MIB if text.isdigit() else 0


def torch_build() -> tuple[str, int | None]:
    """Version of the installed torch, and the major version of the CUDA that it came with."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "", None
    if built := re.search(r"\+cu(\d\d)", version):
        return version, int(built[1])
    for name, cuda in (("nvidia-cuda-runtime-cu12", 12), ("nvidia-cuda-runtime", 13)):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version, cuda
    return version, None

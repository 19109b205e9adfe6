"""Deleting from a folder of blobs while others put the same bytes again.

Whoever puts bytes that are there marks them as new instead of writing them. To delete, bytes are
first moved aside: from then on a putter finds nothing and writes them anew. If they turn out to
have been marked in the last moment, they are moved back.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ASIDE = "aside"  # no blob's folder: those have two letters
MAX_ASIDE_S = 600.0  # what is older was left by a process that died


def touch(path: Path) -> bool:
    """Mark ``path`` as put just now; False when it is not there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def free(folder: Path, key: str, unused_s: float) -> bool:
    """Delete ``folder / key`` unless it was put in the last ``unused_s``; whether it is gone."""
    path = folder / key
    if not _is_unused(path, unused_s):
        return not path.exists()
    aside = folder / ASIDE / f"{key.replace('/', '.')}.{secrets.token_hex(8)}"
    aside.parent.mkdir(exist_ok=True)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    if not _is_unused(aside, unused_s):
        with contextlib.suppress(FileNotFoundError):  # somebody has rescued it
            aside.rename(path)
        return False
    aside.unlink(missing_ok=True)
    return True


def rescue(folder: Path, key: str) -> bool:
    """Move ``folder / key`` back if somebody has moved it aside; whether there was anything.

    Who moved it finds nothing to delete then, and whoever died before moving it back is made up
    for when it is needed.
    """
    for aside in (folder / ASIDE).glob(f"{key.replace('/', '.')}.*"):
        with contextlib.suppress(FileNotFoundError):
            aside.rename(folder / key)
            return True
    return False


def recover(folder: Path) -> None:
    """Move back what a process that died had moved aside; it will be found unused again."""
    for aside in (folder / ASIDE).glob("*"):
        if _is_unused(aside, MAX_ASIDE_S, changed=True):
            prefix, digest, _ = aside.name.split(".")
            with contextlib.suppress(FileNotFoundError):
                aside.rename(folder / prefix / digest)


def _is_unused(path: Path, unused_s: float, *, changed: bool = False) -> bool:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    # A move changes ctime; only a put changes mtime.
    return time.time() - (stat.st_ctime if changed else stat.st_mtime) >= unused_s

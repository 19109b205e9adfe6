"""The data folder of one ``tinsmith up``: claimed by a lock, with a key of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from typing import TYPE_CHECKING

from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tinsmith.paths import DataDir


@contextlib.contextmanager
def claim(folder: DataDir) -> Iterator[int]:
    """Hold the folder's lock; yields its descriptor, which the broker inherits.

    So the folder stays locked for as long as anything of ours writes to it.

    Raises:
        StartupError: another ``tinsmith up`` uses the folder.
    """
    fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StartupError(
                f"data_dir: {folder.root} is in use by another 'tinsmith up' (pid {pid}); stop "
                f"it with 'kill {pid}', or choose another folder with --data-dir"
            ) from None
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield fd
    finally:
        os.close(fd)


def api_key_file(folder: DataDir) -> Path:
    """The folder's file of the one API key, which is made at the first call; mode 0600."""
    if not folder.api_key.exists():
        write_private(folder.api_key, f"tml-{secrets.token_hex(24)}\n")
    return folder.api_key


def write_json(path: Path, content: Mapping[str, object] | Sequence[object]) -> None:
    """Atomically, for its owner only: readers see all of it or nothing."""
    write_private(path, json.dumps(content, indent=2) + "\n")


def remove(path: Path) -> None:
    """Remove a file that may not be there. Raises StartupError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StartupError(f"{path} cannot be replaced: {error.strerror}; name a file") from error


def write_private(path: Path, text: str) -> None:
    """Replace ``path`` in one step by a file of mode 0600. Raises StartupError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        draft.replace(path)
    except OSError as error:
        raise StartupError(
            f"{path} cannot be written: {error.strerror}; free space or fix its permissions"
        ) from error

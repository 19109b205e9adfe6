"""A file that appears under its name only when it is whole and on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.errors import InvalidRequest, StorageFull, TinsmithError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Draft:
    """What ``create`` yields: where to write."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises StorageFull, InvalidRequest."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as exc:
            raise _cannot_write(self._path, exc) from exc


@contextlib.contextmanager
def create(path: Path, *, overwrite: bool) -> Iterator[Draft]:
    """A draft beside ``path``, which takes its place at the end; only its owner can read it.

    Nothing is left of it when the block fails.

    Raises:
        InvalidRequest: ``path`` exists and may not be overwritten, or cannot be written.
        StorageFull: the disk is full.
    """
    if path.exists() and not overwrite:
        raise _exists(path)
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as exc:
        raise _cannot_write(path, exc) from exc
    try:
        yield Draft(path, fd)
        _publish(fd, Path(name), path, overwrite=overwrite)
    finally:
        os.close(fd)
        Path(name).unlink(missing_ok=True)


def _publish(fd: int, draft: Path, path: Path, *, overwrite: bool) -> None:
    try:
        os.fsync(fd)
        if overwrite:
            draft.replace(path)
        else:
            path.hardlink_to(draft)  # unlike a rename, it fails when there is one by now
        _fsync(path.parent)
    except FileExistsError as exc:
        raise _exists(path) from exc
    except OSError as exc:
        raise _cannot_write(path, exc) from exc


def _fsync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exists(path: Path) -> TinsmithError:
    return InvalidRequest(f"{path}: exists already; choose another name, or overwrite with --force")


def _cannot_write(path: Path, exc: OSError) -> TinsmithError:
    reason = exc.strerror or str(exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"{path}: {reason}; free some space, or choose another place")
    return InvalidRequest(f"{path}: cannot be written: {reason}")

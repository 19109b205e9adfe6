"""Blobs as files of a folder, durable when they are there."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

import obstore
from obstore.store import LocalStore

from tinsmith.blobs import trash
from tinsmith.blobs.place import Stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from obstore.store import ObjectStore

_FOLDER = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"[0-9a-f]{62}")


class Folder:
    """A ``Place`` on a file system that all services share."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder; raises OSError when it cannot."""
        folder.mkdir(parents=True, exist_ok=True)
        trash.recover(folder)
        self.store: ObjectStore = LocalStore(folder)
        self._folder = folder

    def find(self, key: str, size: int) -> str | None:
        """See ``Place``."""
        path = self._folder / key
        for _ in range(2):
            try:
                return key if path.stat().st_size == size else None
            except FileNotFoundError:
                if not trash.rescue(self._folder, key):
                    break
        return None

    def put(self, key: str, data: bytes) -> None:
        """See ``Place``."""
        path = self._folder / key
        if self.find(key, len(data)) and trash.touch(path):
            return
        # In parts, a failed write to a folder leaves what it has written for a while.
        obstore.put(self.store, key, data, use_multipart=False)
        for target in (path, path.parent):  # to survive a power cut
            fd = os.open(target, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def free(self, key: str, unused_s: float) -> bool:
        """See ``Place``."""
        return trash.free(self._folder, key, unused_s)

    def stored(self) -> Iterator[Stored]:
        """See ``Place``."""
        for path, stat in self._files():
            if _FILE.fullmatch(path.name):
                yield Stored(path.parent.name + path.name, stat.st_size, stat.st_mtime)

    def leftovers(self, older_s: float, *, remove: bool) -> int:
        """See ``Place``: files of writes that were not finished."""
        before, total = time.time() - older_s, 0
        for path, stat in self._files():
            if _FILE.fullmatch(path.name) is None and stat.st_mtime <= before:
                total += stat.st_size
                if remove:
                    path.unlink(missing_ok=True)
        return total

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Those that are still there when they are looked at: others come and go."""
        for folder in self._folder.iterdir():
            if _FOLDER.fullmatch(folder.name) is None:
                continue
            for path in folder.iterdir():
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue
                yield path, stat

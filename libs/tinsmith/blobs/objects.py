"""Blobs as objects of a store that cannot delete on a condition, such as S3.

Bytes that are put again are not sent again: an empty object under ``used/`` marks them as new.
Deleting must not hit bytes that somebody has just marked, and the store does not help with that.
So whoever deletes first leaves a note under ``dying/`` and then looks at the marks; whoever puts
first leaves a mark and then looks for notes. In every order one of the two sees the other: who
deletes lets it be, or who puts stores a copy under ``again/`` that no note is about. A note whose
writer died keeps others off the object, and costs a copy of it at most; it is removed after a day.

This takes a store that shows what was written to whoever reads afterwards, as S3 does.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import obstore

from tinsmith.blobs.place import Stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore import ObjectMeta
    from obstore.store import ObjectStore

DYING, USED, AGAIN = "dying", "used", "again"  # no blob's key begins so: those have two letters
PART_BYTES = 8 << 20  # of what is sent in parts
PARTS_AT_ONCE = 4
MAX_DELETE_S = 60.0  # who looked longer ago does not delete any more
MAX_NOTE_S = 86400.0  # nobody deletes any more who left a note before that


class Objects:
    """A ``Place`` in an object store."""

    def __init__(self, store: ObjectStore, *, once: ObjectStore) -> None:
        """``once`` is the same store, which repeats no request by itself.

        A repeated deletion could arrive when its note is gone.
        """
        self.store = store
        self._once = once

    def find(self, key: str, size: int) -> str | None:
        """See ``Place``."""
        if self._is_there(key, size):
            return key
        copies = (meta["path"] for meta in self._list(f"{AGAIN}/{key}") if meta["size"] == size)
        return next(copies, None)

    def put(self, key: str, data: bytes) -> None:
        """See ``Place``."""
        if self._is_there(key, len(data)):
            self._write(f"{USED}/{key}", b"")
        else:
            self._write(key, data)
        if any(self._list(f"{DYING}/{key}")) or not self._is_there(key, len(data)):
            self._write(f"{AGAIN}/{key}/{secrets.token_hex(8)}", data)

    def free(self, key: str, unused_s: float) -> bool:
        """See ``Place``; copies under ``again/`` go too, which nobody relies on anew."""
        uses = [self._used_s(key), *(_at(meta) for meta in self._list(f"{AGAIN}/{key}"))]
        there = [used_s for used_s in uses if used_s is not None]
        if not there or time.time() - min(there) < unused_s:
            return not there
        began_s = time.monotonic()
        note = f"{DYING}/{key}/{secrets.token_hex(8)}"
        self._write(note, b"")
        told = self._head(note)
        if told is None:
            return False
        # By the store's clock, which counts in seconds.
        before_s = _at(told) - unused_s - 1.0
        # Read now: who marks it later sees the note.
        used_s = self._used_s(key)
        old = [] if used_s is None or used_s > before_s else [key, f"{USED}/{key}"]
        copies = list(self._list(f"{AGAIN}/{key}"))
        old += [meta["path"] for meta in copies if _at(meta) <= before_s]
        is_in_time = time.monotonic() - began_s < MAX_DELETE_S
        for path in (*(old if is_in_time else ()), note):
            self._once_deleted(path)  # a failed one may still happen, so that the note stays
        return is_in_time and len(old) == len(copies) + (0 if used_s is None else 2)

    def stored(self) -> Iterator[Stored]:
        """See ``Place``."""
        found: dict[str, Stored] = {}
        marked: dict[str, float] = {}
        for meta in self._list(None):
            kind, _, rest = meta["path"].partition("/")
            if kind == USED:
                marked[rest.replace("/", "")] = _at(meta)
            elif kind != DYING:
                prefix, digest = (rest.split("/") if kind == AGAIN else meta["path"].split("/"))[:2]
                name, before = prefix + digest, found.get(prefix + digest)
                size = meta["size"] + (before.size if before else 0)
                found[name] = Stored(name, size, max(_at(meta), before.used_s if before else 0.0))
        for name, blob in found.items():
            yield blob._replace(used_s=max(blob.used_s, marked.get(name, 0.0)))

    def leftovers(self, older_s: float, *, remove: bool) -> int:
        """See ``Place``: notes of who died, and marks of what is gone. They have no bytes."""
        before_s = time.time() - max(older_s, MAX_NOTE_S)
        for kind in (DYING, USED) if remove else ():
            for meta in self._list(kind):
                key = meta["path"].partition("/")[2]
                is_over = kind == DYING or self._head(key) is None
                if is_over and _at(meta) <= before_s:
                    self._once_deleted(meta["path"])
        return 0

    def _used_s(self, key: str) -> float | None:
        """When the object was last put or marked; None when it is not there."""
        first, mark = self._head(key), self._head(f"{USED}/{key}")
        if first is None:
            return None
        return max(_at(first), 0.0 if mark is None else _at(mark))

    def _is_there(self, key: str, size: int) -> bool:
        found = self._head(key)
        return found is not None and found["size"] == size

    def _head(self, key: str) -> ObjectMeta | None:
        try:
            return obstore.head(self.store, key)
        except FileNotFoundError:
            return None

    def _list(self, prefix: str | None) -> Iterator[ObjectMeta]:
        for page in obstore.list(self.store, prefix):
            yield from page

    def _write(self, key: str, data: bytes) -> None:
        obstore.put(self.store, key, data, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def _once_deleted(self, key: str) -> None:
        try:
            obstore.delete(self._once, key)
        except FileNotFoundError:  # some stores say so
            return


def _at(meta: ObjectMeta) -> float:
    return meta["last_modified"].timestamp()

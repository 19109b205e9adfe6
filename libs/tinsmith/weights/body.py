"""Changes as chunks: their bytes one after the other, cut to size, and the table of what they are.

Neither side holds more than a chunk and a tensor's change of it. The table has no addresses, only
lengths: it cannot point at anything but what was sent.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from tinsmith.messages.base import BlobRef
from tinsmith.weights.change import Change
from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.streams import DamagedStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORMAT: Literal["tinsmith-weights-1"] = "tinsmith-weights-1"


class TensorChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor's change without its data, how long that is, and the tensor's digest after it."""

    name: str
    change: Change
    length: int  # bytes
    digest: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the chunks of one entry hold."""

    format: Literal["tinsmith-weights-1"] = FORMAT
    specs: dict[str, TensorSpec] = {}  # of a full state: all tensors
    tensors: tuple[TensorChange, ...]  # in the order of their data
    chunks: tuple[BlobRef, ...]


class Whole(msgspec.Struct, frozen=True, gc=False):
    """A change with its data, and the tensor's name and digest after it."""

    name: str
    change: Change
    digest: int


_MANIFESTS = msgspec.msgpack.Decoder(Manifest)


class BodyWriter:
    """Cuts changes into chunks of ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.tensors: list[TensorChange] = []
        """Of what was added."""
        self._limit = limit
        self._open: list[memoryview] = []  # of the chunk that is not complete yet
        self._length = 0  # theirs

    def add(self, whole: Whole) -> Iterator[bytes]:
        """The chunks that are complete with this change."""
        data = memoryview(whole.change.data)
        bare = msgspec.structs.replace(whole.change, data=b"")
        self.tensors.append(TensorChange(whole.name, bare, len(data), whole.digest))
        while data:
            taken = data[: self._limit - self._length]
            data = data[len(taken) :]
            self._open.append(taken)
            self._length += len(taken)
            if self._length == self._limit:
                yield self._cut()

    def finish(self) -> Iterator[bytes]:
        """The last chunk, if there is a rest."""
        if self._open:
            yield self._cut()

    def _cut(self) -> bytes:
        chunk = b"".join(self._open)
        self._open, self._length = [], 0
        return chunk


class BodyReader:
    """The inverse: changes, as their chunks come in."""

    def __init__(self, tensors: Sequence[TensorChange]) -> None:
        """Raises DamagedStream when a tensor is named twice or a length is negative."""
        names = {entry.name for entry in tensors}
        if len(names) != len(tensors) or any(entry.length < 0 for entry in tensors):
            raise DamagedStream("a table of changes names a tensor twice, or a negative length")
        self._left = list(reversed(tensors))
        self._open: deque[memoryview] = deque()
        self._length = 0  # of what is open

    def feed(self, chunk: bytes) -> Iterator[Whole]:
        """The changes that are complete with this chunk."""
        if chunk:
            self._open.append(memoryview(chunk))
            self._length += len(chunk)
        while self._left and self._left[-1].length <= self._length:
            entry = self._left.pop()
            change = msgspec.structs.replace(entry.change, data=self._taken(entry.length))
            yield Whole(entry.name, change, entry.digest)

    def finish(self) -> Iterator[Whole]:
        """The changes without data at the end.

        Raises:
            DamagedStream: the chunks were longer or shorter than their table says.
        """
        yield from self.feed(b"")
        if self._left or self._length:
            raise DamagedStream(
                f"chunks do not hold what their table says: {self._length} bytes over, "
                f"{len(self._left)} changes missing"
            )

    def _taken(self, length: int) -> bytes:
        self._length -= length
        pieces = []
        while length:
            piece = self._open.popleft()
            pieces.append(piece[:length])
            if len(piece) > length:
                self._open.appendleft(piece[length:])
            length -= len(pieces[-1])
        return b"".join(pieces)


def encode_manifest(manifest: Manifest, limit: int) -> list[bytes]:
    """``manifest`` in pieces of at most ``limit`` bytes."""
    data = msgspec.msgpack.encode(manifest)
    return [data[start : start + limit] for start in range(0, len(data), limit)]


def decode_manifest(pieces: Sequence[bytes]) -> Manifest:
    """The inverse. Raises DamagedStream when it is none, or of a format unknown here."""
    try:
        return _MANIFESTS.decode(b"".join(pieces))
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise DamagedStream(f"a table of changes cannot be read: {exc}") from exc

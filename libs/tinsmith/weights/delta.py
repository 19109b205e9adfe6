"""The change of a whole state: one per tensor, the root it starts from and the root it leads to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tinsmith.weights.change import Change
from tinsmith.weights.streams import DamagedStream

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES = 4 << 20  # a tensor is never split, so that chunks are decoded side by side


class TensorChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor's change, its digest after it, and where in which chunk its bytes lie."""

    name: str
    change: Change  # its data left out
    digest: int
    chunk: int
    start: int
    length: int


@dataclass(frozen=True)
class Delta:
    """From the state called ``base_root`` to the one called ``root``.

    ``changes`` are those of tensors that changed, by name; ``digests`` are theirs afterwards.
    """

    base_root: str
    root: str
    changes: dict[str, Change]
    digests: dict[str, int]

    @property
    def size_bytes(self) -> int:
        """The coded bytes."""
        return sum(len(change.data) for change in self.changes.values())

    @property
    def changed(self) -> int:
        """Elements that differ."""
        return sum(change.count for change in self.changes.values())


def to_chunks(delta: Delta) -> tuple[tuple[TensorChange, ...], list[bytes]]:
    """The delta as a table and the byte strings that it points into."""
    table: list[TensorChange] = []
    chunks: list[list[bytes]] = [[]]
    filled = 0
    for name, change in delta.changes.items():
        if filled and filled + len(change.data) > CHUNK_BYTES:
            chunks.append([])
            filled = 0
        bare = msgspec.structs.replace(change, data=b"")
        place = (len(chunks) - 1, filled, len(change.data))
        table.append(TensorChange(name, bare, delta.digests[name], *place))
        chunks[-1].append(change.data)
        filled += len(change.data)
    return tuple(table), [b"".join(parts) for parts in chunks if parts]


def from_chunks(
    table: Sequence[TensorChange], chunks: Sequence[bytes], *, base_root: str, root: str
) -> Delta:
    """The inverse of ``to_chunks``.

    Raises:
        DamagedStream: the table points outside of the chunks, or names a tensor twice.
    """
    changes: dict[str, Change] = {}
    for entry in table:
        if entry.name in changes:
            raise DamagedStream(f"{entry.name!r} is changed twice")
        if not 0 <= entry.chunk < len(chunks):
            raise DamagedStream(f"{entry.name!r} lies in chunk {entry.chunk} of {len(chunks)}")
        data = chunks[entry.chunk][entry.start : entry.start + entry.length]
        if min(entry.start, entry.length) < 0 or len(data) != entry.length:
            raise DamagedStream(f"{entry.name!r} does not lie within its chunk")
        changes[entry.name] = msgspec.structs.replace(entry.change, data=data)
    digests = {entry.name: entry.digest for entry in table}
    return Delta(base_root, root, changes, digests)

"""What serves: an engine's memory, written in place and read back to be proven."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tinsmith.weights.digest import digest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from tinsmith.weights.bits import Bits, Indices
    from tinsmith.weights.held import Write


class Provable(Protocol):
    """The arrays of one plane (``planes``) that an engine computes with, by name.

    Elements are counted in the checkpoint's order, whatever the engine's layout is. All but
    ``names`` and ``pause`` is called on a thread of the receiver, one at a time.
    """

    def names(self) -> set[str]:
        """Of all arrays."""

    def digest(self, name: str) -> int:
        """``tinsmith.weights.digest`` of the whole array, from that memory."""

    def pause(self) -> AbstractAsyncContextManager[None]:
        """While it is entered, nothing is computed and no answer leaves.

        What was derived from the old weights, a cache of keys and values say, is dropped or
        tagged by the engine before it computes again.
        """


class EngineMemory(Provable, Protocol):
    """Memory at hand: element by element."""

    def write(self, name: str, values: Bits, indices: Indices | None) -> None:
        """Set the elements at ``indices``, or all of them when that is None."""

    def read(self, name: str, indices: Indices) -> Bits:
        """The elements at ``indices`` as they are in the memory that is computed with."""


@runtime_checkable
class StagedMemory(Provable, Protocol):
    """Memory that takes all that a version writes in one go: what can be done before is."""

    def stage(self, writes: Sequence[Write], digests: Mapping[str, int]) -> None:
        """Bring these near, while the engine serves.

        ``digests``: at least those that arrays must have which are written whole.

        Raises:
            StorageFull: there is no room for them now.
            WrongBits: it cannot be done.
        """

    def swap(self) -> None:
        """In a pause: write what was staged last, and prove all of it from that memory.

        Raises:
            WrongBits: the memory does not hold it; parts of it may be written.
        """


class ArrayMemory:
    """An engine's memory that numpy can see: flat unsigned arrays, shared with whoever computes.

    A subclass overrides ``pause``.
    """

    def __init__(self, arrays: Mapping[str, Bits]) -> None:
        """``arrays`` are written in place; each flat and contiguous."""
        self.arrays = dict(arrays)

    def names(self) -> set[str]:
        """See ``EngineMemory``."""
        return set(self.arrays)

    def write(self, name: str, values: Bits, indices: Indices | None) -> None:
        """See ``EngineMemory``."""
        if indices is None:
            self.arrays[name][:] = values
        else:
            self.arrays[name][indices] = values

    def read(self, name: str, indices: Indices) -> Bits:
        """See ``EngineMemory``."""
        found: Bits = self.arrays[name][indices]
        return found

    def digest(self, name: str) -> int:
        """See ``EngineMemory``."""
        return digest(name, self.arrays[name])

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """See ``EngineMemory``."""
        yield

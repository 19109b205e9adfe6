"""What a receiver holds of a lineage: the canonical bits, and what its engine's plane must be.

The canonical bits lie beside the engine's memory, and every array of the plane is derived from
them. A new version is staged here and written to the engine later, in one go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tinsmith.weights.digest import TensorEntry, digest, root, updated
from tinsmith.weights.planes import CANONICAL
from tinsmith.weights.sparse import Sparse
from tinsmith.weights.state import WrongBits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tinsmith.weights.bits import Bits, Indices
    from tinsmith.weights.delta import Delta
    from tinsmith.weights.memory import EngineMemory, Provable
    from tinsmith.weights.planes import Plane
    from tinsmith.weights.specs import TensorSpec
    from tinsmith.weights.state import Staged, WeightState


class Write(NamedTuple):
    """Elements of an engine's array and what they become; ``indices`` None: all of them."""

    name: str
    values: Bits
    indices: Indices | None

    def to(self, memory: EngineMemory) -> None:
        """Write, and read back what was written.

        Raises:
            WrongBits: the engine's memory is not what it was given.
        """
        try:
            memory.write(self.name, self.values, self.indices)
        except (ValueError, IndexError, KeyError) as exc:
            raise WrongBits(f"the engine's {self.name!r} does not take what is its own") from exc
        if self.indices is not None and not np.array_equal(
            memory.read(self.name, self.indices), self.values
        ):
            raise WrongBits(f"the engine's {self.name!r} does not hold what was written to it")


@dataclass(frozen=True)
class Staging:
    """A version that is proven, and what to write for it."""

    staged: Staged
    writes: list[Write]
    digests: dict[str, int]  # of the plane's arrays that change, afterwards
    plane_root: str

    @property
    def root(self) -> str:
        """Of the canonical bits."""
        return self.staged.root


class Held:
    """The bits of one version."""

    def __init__(self, state: WeightState, plane: Plane) -> None:
        """``state`` is taken over."""
        self.state = state
        self.plane = plane
        self._specs: dict[str, TensorSpec] = {}
        for name, spec in state.specs.items():
            self._specs |= plane.specs(name, spec)
        self.digests = (
            dict(state.digests)
            if plane.id == CANONICAL
            else {write.name: digest(write.name, write.values) for write in self.whole()}
        )
        """Of the plane's arrays."""
        self.plane_root = self._root(self.digests)

    @property
    def root(self) -> str:
        """Of the canonical bits."""
        return self.state.root

    def whole(self) -> Iterator[Write]:
        """All of the plane."""
        for name, spec in self.state.specs.items():
            for array, values in self.plane.whole(name, spec, self.state[name]).items():
                yield Write(array, values, None)

    def stage(self, *deltas: Delta) -> Staging:
        """Read consecutive deltas as one, prove where they lead, derive what the plane becomes.

        Raises:
            WrongBits, DamagedStream: as ``WeightState.stage``.
        """
        return self.derive(self.state.stage(*deltas))

    def derive(self, staged: Staged) -> Staging:
        """What the plane becomes with ``staged``."""
        if self.plane.id == CANONICAL:
            writes = [_as_write(name, patch) for name, patch in staged.patches.items()]
            return Staging(staged, writes, dict(staged.digests), staged.root)
        writes, digests = [], {}
        for name, patch in staged.patches.items():
            for write, found in self._derived(name, patch):
                writes.append(write)
                digests[write.name] = found
        return Staging(staged, writes, digests, self._root({**self.digests, **digests}))

    def swap(self, staging: Staging) -> None:
        """Become what was staged here."""
        self.state.swap(staging.staged)
        self.follow(staging)

    def follow(self, staging: Staging) -> None:
        """As ``swap``, of the plane alone: the canonical bits were swapped already."""
        self.digests.update(staging.digests)
        self.plane_root = staging.plane_root

    def check(self, memory: Provable, *, canonical: bool = False) -> None:
        """Digest the engine's memory, and with ``canonical`` the bits it is derived from.

        Raises:
            WrongBits: naming the first array that is not what it should be.
        """
        if canonical:
            self.state.check()
        for name in self.digests:
            self.check_array(memory, name)

    def check_array(self, memory: Provable, name: str) -> None:
        """As ``check``, one array."""
        if (found := memory.digest(name)) != self.digests[name]:
            raise WrongBits(
                f"the engine's {name!r} holds {found:016x}, not {self.digests[name]:016x}"
            )

    def _derived(self, name: str, patch: Sparse | Bits) -> Iterator[tuple[Write, int]]:
        spec = self.state.specs[name]
        if not isinstance(patch, Sparse):
            for array, values in self.plane.whole(name, spec, patch).items():
                yield Write(array, values, None), digest(array, values)
            return
        for array, shift in self.plane.shifts(name, spec, self.state[name], patch).items():
            if shift.indices.size:
                after = updated(array, self.digests[array], shift.indices, shift.old, shift.new)
                yield Write(array, shift.new, shift.indices), after

    def _root(self, digests: Mapping[str, int]) -> str:
        return root(
            TensorEntry(name, spec.dtype, spec.shape, digests[name])
            for name, spec in self._specs.items()
        )


def _as_write(name: str, patch: Sparse | Bits) -> Write:
    if isinstance(patch, Sparse):
        return Write(name, patch.values, patch.indices)
    return Write(name, patch, None)

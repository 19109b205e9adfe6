"""All tensors of a model as bits: compared, moved on by deltas, and never to an unproven root.

A delta is staged first, beside the bits in use: read, added to the digests, and compared with the
root that it promises. Only then is it swapped in, by scattering what changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import ServerError
from tinsmith.weights.bits import changed
from tinsmith.weights.change import apply, between, read
from tinsmith.weights.delta import Delta
from tinsmith.weights.digest import TensorEntry, digest, root, updated
from tinsmith.weights.sparse import Sparse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tinsmith.weights.bits import Bits
    from tinsmith.weights.change import Change


class WrongBits(ServerError):
    """Bits are not those that a root or a digest names."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's type and shape; ``dtype`` by its common name, ``bfloat16`` say."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Staged:
    """A delta that has been read and proven, ready to be swapped in."""

    root: str
    patches: dict[str, Sparse | Bits]
    digests: dict[str, int]


class WeightState:
    """A model's bits by tensor name; each flat, in checkpoint order."""

    def __init__(self, specs: Mapping[str, TensorSpec], bits: Mapping[str, Bits]) -> None:
        """``bits`` are taken over, not copied; one array per spec."""
        self._specs = dict(specs)
        self._bits = dict(bits)
        self._digests = {name: digest(name, array) for name, array in self._bits.items()}
        self.root = self._root(self._digests)

    def __getitem__(self, name: str) -> Bits:
        """The bits of one tensor, not copied."""
        return self._bits[name]

    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._bits.keys()

    def delta(self, new: Mapping[str, Bits]) -> Delta:
        """What leads from this state to one with the tensors ``new``; the others stay."""
        changes, digests = {}, {}
        for name, bits in new.items():
            change = between(self._bits[name], bits)
            if change.kind == "same":
                continue
            changes[name] = change
            digests[name] = self._digest_after(name, read(change, self._bits[name]))
        return Delta(self.root, self._root({**self._digests, **digests}), changes, digests)

    def stage(self, *deltas: Delta) -> Staged:
        """Read consecutive deltas as one, and prove where they lead; nothing changes here.

        Raises:
            WrongBits: they do not start from this state, or do not lead to the root they name.
            DamagedStream: one cannot be read.
        """
        reached = self.root
        for delta in deltas:
            if delta.base_root != reached:
                raise WrongBits(f"a delta starts from {delta.base_root}, the state is {reached}")
            reached = delta.root
        names = {name for delta in deltas for name in delta.changes}
        if unknown := names - self._bits.keys():
            raise WrongBits(f"{min(unknown)!r} would change, which this state does not have")
        patches = {
            name: self._patch(name, [d.changes[name] for d in deltas if name in d.changes])
            for name in sorted(names)
        }
        digests = {name: self._digest_after(name, patch) for name, patch in patches.items()}
        promised = {name: d for delta in deltas for name, d in delta.digests.items()}
        for name, found in digests.items():
            if found != promised.get(name):
                raise WrongBits(f"{name!r} would become {found:016x}, not as its delta says")
        if (found_root := self._root({**self._digests, **digests})) != reached:
            raise WrongBits(f"the deltas lead to {found_root}, not to {reached}")
        return Staged(reached, patches, digests)

    def swap(self, staged: Staged) -> None:
        """Become what ``staged`` has proven; it must have been staged on this very state."""
        for name, patch in staged.patches.items():
            if isinstance(patch, Sparse):
                self._bits[name][patch.indices] = patch.values
            else:
                self._bits[name][:] = patch
        self._digests.update(staged.digests)
        self.root = staged.root

    def check(self, names: Iterable[str] | None = None) -> None:
        """Digest the bits again, of all tensors or of ``names``.

        Raises:
            WrongBits: naming the first tensor whose bits are not what they should be.
        """
        for name in self._bits if names is None else names:
            if (found := digest(name, self._bits[name])) != self._digests[name]:
                raise WrongBits(f"{name!r} holds {found:016x}, not {self._digests[name]:016x}")

    def _patch(self, name: str, changes: list[Change]) -> Sparse | Bits:
        """What several changes of one tensor come to."""
        old = self._bits[name]
        if len(changes) == 1:
            return read(changes[0], old)
        new = old
        for change in changes:
            new = apply(change, new)
        indices = changed(old, new)
        return Sparse(indices, new[indices])

    def _digest_after(self, name: str, patch: Sparse | Bits) -> int:
        if not isinstance(patch, Sparse):
            return digest(name, patch)
        old = self._bits[name][patch.indices]
        return updated(name, self._digests[name], patch.indices, old, patch.values)

    def _root(self, digests: Mapping[str, int]) -> str:
        return root(
            TensorEntry(name, spec.dtype, spec.shape, digests[name])
            for name, spec in self._specs.items()
        )


def bits_of(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Bits:
    """float32 values as bfloat16 patterns: round to nearest, ties to even; NaN stays NaN."""
    wide = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    rounded = wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))
    is_nan = (wide & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    kept = np.where(is_nan, wide | np.uint32(0x0040_0000), rounded)
    patterns: Bits = (kept >> np.uint32(16)).astype(np.uint16)
    return patterns

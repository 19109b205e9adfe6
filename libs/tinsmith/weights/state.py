"""All tensors of a model as bits: compared, moved on by deltas, and never to an unproven root.

A delta is staged first, beside the bits in use: read, added to the digests, and compared with the
root that it promises. Only then is it swapped in, by scattering what changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest, ServerError
from tinsmith.weights.bits import changed
from tinsmith.weights.body import Whole
from tinsmith.weights.change import apply, compare, dense, read, whole
from tinsmith.weights.delta import Delta
from tinsmith.weights.digest import TensorEntry, digest, root, updated
from tinsmith.weights.sparse import Sparse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tinsmith.weights.bits import Bits
    from tinsmith.weights.change import Change
    from tinsmith.weights.specs import TensorSpec


ITEM_SIZE = {"bfloat16": 2, "float32": 4}
"""Of the types of canonical tensors, in bytes."""


class WrongBits(ServerError):
    """Bits are not those that a root or a digest names."""


@dataclass(frozen=True)
class Staged:
    """A delta that has been read and proven, ready to be swapped in."""

    root: str
    patches: dict[str, Sparse | Bits]
    digests: dict[str, int]


class WeightState:
    """A model's bits by tensor name; each flat, in checkpoint order."""

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        bits: Mapping[str, Bits],
        digests: Mapping[str, int] | None = None,
    ) -> None:
        """``bits`` are taken over, not copied; one array per spec. ``digests``: if proven.

        Raises:
            InvalidRequest: a tensor is not there, or is not what its spec says.
        """
        for name in specs.keys() | bits.keys():
            _check(name, specs.get(name), bits.get(name))
        self._specs = dict(specs)
        self._bits = dict(bits)
        self._digests = dict(digests or {name: digest(name, b) for name, b in bits.items()})
        self.root = self._root(self._digests)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Of all tensors."""
        return self._specs

    @property
    def digests(self) -> Mapping[str, int]:
        """Of all tensors."""
        return self._digests

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(array.size for array in self._bits.values())

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(array.nbytes for array in self._bits.values())

    def full(self, code: Callable[[Bits], Change] = dense) -> Iterator[Whole]:
        """All of it, tensor by tensor, each written by ``code``: ``dense`` or ``raw``."""
        for name, bits in self._bits.items():
            yield Whole(name, code(bits), self._digests[name])

    def __getitem__(self, name: str) -> Bits:
        """The bits of one tensor, not copied."""
        return self._bits[name]

    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._bits.keys()

    def delta(self, new: Mapping[str, Bits]) -> Delta:
        """What leads from this state to one with the tensors ``new``; the others stay."""
        return self.prepare(new)[0]

    def prepare(self, new: Mapping[str, Bits]) -> tuple[Delta, Staged]:
        """As ``delta``, and the same staged here: to be swapped in when others can have it.

        Raises:
            InvalidRequest: ``new`` has other tensors than this state, or of another size.
        """
        if unknown := new.keys() - self._bits.keys():
            raise InvalidRequest(
                f"weights: {min(unknown)!r} is no tensor of this lineage; open another for it"
            )
        changes, digests, patches = {}, {}, {}
        for name, bits in new.items():
            change, patch = compare(self._bits[name], bits)
            if change.kind == "same":
                continue
            changes[name], patches[name] = change, patch
            digests[name] = self._digest_after(name, patch)
        reached = self._root({**self._digests, **digests})
        return Delta(self.root, reached, changes, digests), Staged(reached, patches, digests)

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


class StateReader:
    """Takes in what ``WeightState.full`` has written, each tensor proven as it comes."""

    def __init__(
        self, specs: Mapping[str, TensorSpec], into: Mapping[str, Bits] | None = None
    ) -> None:
        """With ``into`` the bits are written there, one array per spec, and not to new ones."""
        self._specs = specs
        self._into = into
        self._bits: dict[str, Bits] = {}
        self._digests: dict[str, int] = {}

    def take(self, read: Whole) -> None:
        """Raises WrongBits or DamagedStream when it is not a tensor of that state."""
        spec = self._specs.get(read.name)
        if spec is None:
            raise WrongBits(f"{read.name!r} is no tensor of a full state")
        bits = whole(read.change, itemsize(spec), spec.size)
        if (found := digest(read.name, bits)) != read.digest:
            raise WrongBits(f"{read.name!r} is {found:016x}, not as its state says")
        if self._into is not None:
            self._into[read.name][:] = bits
            bits = self._into[read.name]
        self._bits[read.name] = bits if bits.flags.writeable else bits.copy()
        self._digests[read.name] = found

    def finish(self, root: str) -> WeightState:
        """The state; WrongBits when a tensor is missing, or it is another than ``root`` names."""
        if missing := self._specs.keys() - self._bits.keys():
            raise WrongBits(f"{min(missing)!r} is missing from a full state")
        state = WeightState(self._specs, self._bits, self._digests)
        if state.root != root:
            raise WrongBits(f"the state is {state.root}, not {root}")
        return state


def itemsize(spec: TensorSpec) -> int:
    """Bytes of an element. Raises WrongBits for what no lineage has."""
    size = ITEM_SIZE.get(spec.dtype)
    if size is None or min(spec.shape, default=1) < 0:
        raise WrongBits(f"{spec} is no tensor; {' and '.join(ITEM_SIZE)} are the types")
    return size


def _check(name: str, spec: TensorSpec | None, bits: Bits | None) -> None:
    if spec is None or bits is None:
        raise InvalidRequest(f"weights: {name!r} needs both its bits and what they are")
    if bits.shape != (spec.size,) or bits.dtype != np.dtype(f"u{itemsize(spec)}"):
        raise InvalidRequest(
            f"weights: {name!r} is {bits.dtype}{bits.shape}, which is not {spec} as flat bits"
        )


def bits_of(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Bits:
    """float32 values as bfloat16 patterns: round to nearest, ties to even; NaN stays NaN."""
    wide = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    rounded = wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))
    is_nan = (wide & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    kept = np.where(is_nan, wide | np.uint32(0x0040_0000), rounded)
    patterns: Bits = (kept >> np.uint32(16)).astype(np.uint16)
    return patterns

"""The change of one tensor from one version to the next, without loss, in the smallest known form.

    same   nothing changed
    ulp    positions, and steps along the ordered bit patterns: adds up, and can be undone
    set    positions and new patterns: may be applied twice, and to an unknown base
    xor    old and new patterns combined, byte planes
    dense  the new patterns, byte planes
    raw    the new patterns as they are: for what nearly is no smaller when it is coded

Which is smallest is found by trial on a sample, or by a look at some steps if few elements have
changed. Whatever is coded has been read back first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import numpy as np

from tinsmith.errors import InvalidRequest
from tinsmith.weights import sparse
from tinsmith.weights.bits import changed, ordered, unordered, unzigzag, zigzag
from tinsmith.weights.sparse import POSITION_STREAMS, Sparse
from tinsmith.weights.streams import DamagedStream, Unpacker, join_planes, pack, planes

if TYPE_CHECKING:
    from tinsmith.weights.bits import Bits, Indices

Kind: TypeAlias = Literal["same", "ulp", "set", "xor", "dense", "raw"]

WHOLE: tuple[Kind, ...] = ("dense", "raw")
"""Forms that hold every pattern, and need none of before."""

SAMPLE_PIECES = 8
SAMPLE_PIECE = 1 << 14  # elements
DENSE_FROM = 0.15  # share of changed elements below which a number for each is not worth trying
FEW = 2048  # changed elements that are looked at to choose between sparse forms


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What happened to a tensor of ``size`` elements of ``width`` bytes; ``count`` changed."""

    kind: Kind
    width: int
    size: int
    count: int
    data: bytes = b""


def between(old: Bits, new: Bits) -> Change:
    """The smallest change from ``old`` to ``new``; raises as ``compare``."""
    return compare(old, new)[0]


def compare(old: Bits, new: Bits) -> tuple[Change, Sparse | Bits]:
    """The smallest change from ``old`` to ``new``, and what ``read`` would make of it.

    Raises:
        InvalidRequest: the two are not of one dtype and length.
    """
    if old.dtype != new.dtype or old.shape != new.shape or old.ndim != 1:
        raise InvalidRequest(
            f"weights: {old.dtype}{old.shape} and {new.dtype}{new.shape} are not two versions of "
            "one tensor; both must be flat, of one type and length"
        )
    indices = changed(old, new)
    if not indices.size:
        return Change("same", old.itemsize, old.size, 0), Sparse(indices, new[indices])
    kind = _smallest(old, new, indices)
    change = Change(kind, old.itemsize, old.size, indices.size, _write(kind, old, new, indices))
    return change, _checked(change, old, new, indices)


def dense(bits: Bits) -> Change:
    """All of ``bits``, to whatever was there; read back as by ``compare``."""
    change = Change("dense", bits.itemsize, bits.size, bits.size, pack(planes(bits)))
    _checked(change, bits, bits, np.empty(0, np.int64))
    return change


def raw(bits: Bits) -> Change:
    """All of ``bits``, to whatever was there, without an attempt to make them smaller."""
    nothing = np.empty(0, np.int64)
    return Change("raw", bits.itemsize, bits.size, bits.size, _write("raw", bits, bits, nothing))


def read(change: Change, old: Bits) -> Sparse | Bits:
    """The new patterns: where they are and which, or all of them when the form is not sparse.

    Raises:
        DamagedStream: the change is not one that ``between`` has made, or not of this tensor.
    """
    _check(change, old.itemsize, old.size)
    match change.kind:
        case "same":
            return Sparse(np.empty(0, np.int64), np.empty(0, old.dtype))
        case "dense" | "raw":
            return _read_all(change)
        case "xor":
            patterns: Bits = old ^ _read_planes(change)
            return patterns
        case "set":
            return _read_set(change)
        case "ulp":
            indices, steps = _read_steps(change)
            return Sparse(indices, unordered(ordered(old[indices]) + steps))


def whole(change: Change, width: int, size: int) -> Bits:
    """All patterns of a tensor of ``size`` elements of ``width`` bytes, of which nothing is known.

    They are read-only if they are those of ``change.data`` itself.

    Raises:
        DamagedStream: as ``read``, and for a change that has only some of them.
    """
    _check(change, width, size)
    if change.kind not in WHOLE:
        raise DamagedStream(f"a {change.kind} change has not all patterns of its tensor")
    return _read_all(change)


def apply(change: Change, old: Bits) -> Bits:
    """The new patterns of the whole tensor; ``old`` is left as it is. Raises as ``read``."""
    new = read(change, old)
    if not isinstance(new, Sparse):
        return new
    whole = old.copy()
    whole[new.indices] = new.values
    return whole


def fold(first: Change, second: Change) -> Change:
    """One change that does what ``first`` and then ``second`` do.

    Raises:
        InvalidRequest: the two forms have no sum without the tensor itself; apply them in turn.
    """
    if (first.width, first.size) != (second.width, second.size):
        raise DamagedStream("changes of different tensors cannot be folded")
    if first.kind == "same" or second.kind in WHOLE:
        return second
    if second.kind == "same":
        return first
    if first.kind in WHOLE:
        return dense(apply(second, _read_all(first)))
    match first.kind, second.kind:
        case "ulp", "ulp":
            return _of_steps(first, _add(_read_steps(first), _read_steps(second)))
        case "xor", "xor":
            return _of_xor(first, _read_planes(first) ^ _read_planes(second))
        case _:
            raise InvalidRequest(
                f"a {first.kind} and a {second.kind} change have no sum; apply them in turn"
            )


def invert(change: Change) -> Change:
    """The change that leads back; only ``same``, ``ulp`` and ``xor`` have one."""
    if change.kind in ("same", "xor"):
        return change
    if change.kind != "ulp":
        raise InvalidRequest(f"a {change.kind} change does not know what was there before it")
    indices, steps = _read_steps(change)
    return _of_steps(change, Sparse(indices, -steps))


def _check(change: Change, width: int, size: int) -> None:
    if (width, size) != (change.width, change.size):
        raise DamagedStream(
            f"the change is of {change.size} elements of {change.width} bytes, "
            f"the tensor has {size} of {width}"
        )


def _checked(change: Change, old: Bits, new: Bits, indices: Indices) -> Sparse | Bits:
    """Read ``change`` back: nothing leaves that does not lead to ``new``."""
    found = read(change, old)
    if isinstance(found, Sparse):
        is_right = np.array_equal(found.indices, indices)
        is_right = is_right and np.array_equal(found.values, new[indices])
    else:
        is_right = np.array_equal(found, new)
    if not is_right:
        msg = f"the {change.kind} form of a change does not read back as it was written"
        raise RuntimeError(msg)
    return found


def _smaller(old: Bits, new: Bits, some: Indices) -> Kind:
    """Of the sparse forms: steps are smaller than patterns if most of them fit a nibble."""
    steps = zigzag(ordered(new[some]) - ordered(old[some]))
    return "ulp" if 2 * np.count_nonzero(steps < sparse.ESCAPE) >= some.size else "set"


def _smallest(old: Bits, new: Bits, indices: Indices) -> Kind:
    """The form that makes the least of a sample, or of all of a small tensor."""
    if indices.size <= DENSE_FROM * old.size:
        return _smaller(old, new, indices[:: max(1, indices.size // FEW)])
    kinds: tuple[Kind, ...] = ("ulp", "set", "xor", "dense")
    if old.size > SAMPLE_PIECES * SAMPLE_PIECE:
        starts = np.linspace(0, old.size - SAMPLE_PIECE, SAMPLE_PIECES).astype(np.int64)
        at = (starts[:, None] + np.arange(SAMPLE_PIECE)).reshape(-1)
        old, new = old[at], new[at]
    indices = changed(old, new)
    return min(kinds, key=lambda kind: len(_write(kind, old, new, indices)))


def _write(kind: Kind, old: Bits, new: Bits, indices: Indices) -> bytes:
    match kind:
        case "dense":
            return pack(planes(new))
        case "raw":
            return new.astype(f"<u{new.itemsize}", copy=False).tobytes()
        case "xor":
            return pack(planes(old ^ new))
        case "set":
            return pack([*sparse.write_positions(indices, old.size), *planes(new[indices])])
        case "ulp":
            steps = ordered(new[indices]) - ordered(old[indices])
            return _write_steps(Sparse(indices, steps), old.size)
        case "same":
            return b""


def _write_steps(steps: Sparse, size: int) -> bytes:
    positions = sparse.write_positions(steps.indices, size)
    return pack([*positions, *sparse.write_small(zigzag(steps.values))])


def _read_steps(change: Change) -> Sparse:
    streams = Unpacker(change.data, POSITION_STREAMS + 1 + change.width)
    indices = sparse.read_positions(streams, _count(change), change.size)
    folded = sparse.read_small(streams, change.count, np.dtype(f"<u{change.width}"))
    return Sparse(indices, unzigzag(folded))


def _read_set(change: Change) -> Sparse:
    streams = Unpacker(change.data, POSITION_STREAMS + change.width)
    indices = sparse.read_positions(streams, _count(change), change.size)
    values = join_planes([streams.next(change.count) for _ in range(change.width)])
    return Sparse(indices, values)


def _read_all(change: Change) -> Bits:
    if change.kind == "dense":
        return _read_planes(change)
    if len(change.data) != change.size * change.width:
        raise DamagedStream(
            f"{len(change.data)} bytes are not {change.size} elements of {change.width} bytes"
        )
    return np.frombuffer(change.data, f"<u{change.width}")


def _read_planes(change: Change) -> Bits:
    streams = Unpacker(change.data, change.width)
    return join_planes([streams.next(change.size) for _ in range(change.width)])


def _count(change: Change) -> int:
    if not 0 <= change.count <= change.size:
        raise DamagedStream(f"count: {change.count} is not within 0 and {change.size} elements")
    return change.count


def _add(first: Sparse, second: Sparse) -> Sparse:
    """Steps at the union of both positions; those that cancel out are left out."""
    indices = np.concatenate([first.indices, second.indices])
    steps = np.concatenate([first.values, second.values])
    union, place = np.unique(indices, return_inverse=True)
    total = np.zeros(union.size, steps.dtype)
    np.add.at(total, place, steps)
    stays = total != 0
    return Sparse(union[stays], total[stays])


def _of_steps(like: Change, steps: Sparse) -> Change:
    if not steps.indices.size:
        return Change("same", like.width, like.size, 0)
    return Change("ulp", like.width, like.size, steps.indices.size, _write_steps(steps, like.size))


def _of_xor(like: Change, patterns: Bits) -> Change:
    count = int(np.count_nonzero(patterns))
    if not count:
        return Change("same", like.width, like.size, 0)
    return Change("xor", like.width, like.size, count, pack(planes(patterns)))

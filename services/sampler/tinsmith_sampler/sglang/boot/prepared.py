"""A change of weights that was read, checked and summed beside the service: one step is left.

What that step takes is ready before it: elements lie in memory of our own and not in a file, and
of each digest everything that does not depend on what the model's memory will hold. So the server
is still for little more than the writing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from . import digesting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .places import Place
    from .staged import Part

    Sums = list[list[int]]
    """Of each part, at each of its places, what its elements add to the tensor's digest."""


_AT_ONCE = 1 << 12
"""Elements that are written and read back: what a core's cache holds the surroundings of."""


class Prepared:
    """Parts of one change, to be written where a model holds them."""

    def __init__(self, parts: Sequence[Part], places: Mapping[str, tuple[Place, ...]]) -> None:
        """Raises ValueError for a part that does not fit; nothing is written here."""
        slots = [
            _Slot(number, part, place)
            for number, part in enumerate(parts)
            for place in _found(places, part.name)
        ]
        for slot in slots:
            _check(slot.part, slot.place)
        self._count = len(parts)
        self._all: list[_Whole | _Elements] = [
            _Whole(slot) for slot in slots if slot.part.indices is None
        ]
        sparse = [slot for slot in slots if slot.part.indices is not None]
        kinds = {slot.part.values.dtype for slot in sparse}
        self._all += [
            _Elements([slot for slot in sparse if slot.part.values.dtype == kind]) for kind in kinds
        ]

    def staged(self) -> Sums:
        """By the elements as they were read."""
        found = self._nothing()
        for each in self._all:
            each.add_staged(found)
        return found

    def write(self) -> Sums:
        """Write all, and read it back: by what each place holds then."""
        found = self._nothing()
        for each in self._all:
            each.write()
        # Not before all is written: a whole tensor's last block would be compared in a core's
        # cache, which says nothing of the memory behind it.
        for each in self._all:
            each.add_written(found)
        return found

    def _nothing(self) -> Sums:
        return [[] for _ in range(self._count)]


class _Slot(NamedTuple):
    """A part at one of its places."""

    number: int
    part: Part
    place: Place


class _Whole:
    """All elements of a tensor, at one of its places; their arrays stay in the file."""

    def __init__(self, slot: _Slot) -> None:
        self._slot = slot
        self._sum = digesting.digest(slot.part.values, slot.part.salt)
        self._total = int(slot.part.values.sum())

    def add_staged(self, found: Sums) -> None:
        """The sum of what was read."""
        found[self._slot.number].append(self._sum)

    def write(self) -> None:
        """Put them in their place."""
        self._slot.place.bits().copy_(self._slot.part.values)

    def add_written(self, found: Sums) -> None:
        """The sum of what the place holds."""
        _, part, place = self._slot
        bits, total, is_equal = place.bits(), 0, True
        step = digesting.step(bits)
        for start in range(0, len(bits), step):
            here = bits[start : start + step]
            values = part.values[start : start + step].to(bits.device)
            is_equal = is_equal and torch.equal(here, values)
            total += int(here.sum())
        is_right = is_equal and total == self._total  # as of single elements, see there
        found[self._slot.number].append(
            self._sum if is_right else digesting.digest(bits, part.salt)
        )


class _Elements:
    """Single elements of many parameters, all of one type: their arrays are one, end to end."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self._slots = slots
        self._sizes = [len(slot.part.values) for slot in slots]
        device = slots[0].place.bits().device
        indices = [slot.part.indices for slot in slots if slot.part.indices is not None]
        # Copies: pages of the file would be read when they are written.
        self._at = torch.split(torch.cat(indices).to(device), self._sizes)
        self._values = torch.cat([slot.part.values for slot in slots]).to(device)
        self._read = torch.zeros_like(self._values)
        self._total = int(self._values.sum())
        each = zip(self._at, slots, strict=True)
        self._keys = torch.cat([digesting.keys(at, slot.part.salt) for at, slot in each])
        self._sums = self._summed(self._values)

    def add_staged(self, found: Sums) -> None:
        """The sums of what was read."""
        self._add(found, self._sums)

    def write(self) -> None:
        """Put them in their places, and read what is there then."""
        each = (torch.split(one, self._sizes) for one in (self._values, self._read))
        for slot, at, values, read in zip(self._slots, self._at, *each, strict=True):
            _exchange(slot.place.bits(), at, values, read)

    def add_written(self, found: Sums) -> None:
        """The sums of what the places held when it was read."""
        # Equal bits have equal sums: so they are added up again only where something is wrong. The
        # total shows values that have changed since they were summed.
        is_equal = torch.equal(self._read, self._values) and int(self._read.sum()) == self._total
        self._add(found, self._sums if is_equal else self._summed(self._read))

    def _summed(self, bits: torch.Tensor) -> list[int]:
        return digesting.digest_parts(self._keys, bits, self._sizes)

    def _add(self, found: Sums, sums: Sequence[int]) -> None:
        for slot, one in zip(self._slots, sums, strict=True):
            found[slot.number].append(one)


def _exchange(
    bits: torch.Tensor, at: torch.Tensor, values: torch.Tensor, read: torch.Tensor
) -> None:
    """Write ``values`` to ``bits`` at ``at``, and into ``read`` what is there then; all [n]."""
    step = len(at) or 1 if bits.is_cuda else _AT_ONCE
    for start in range(0, len(at), step):
        here = slice(start, start + step)
        bits.scatter_(0, at[here], values[here])
        torch.gather(bits, 0, at[here], out=read[here])


def _found(places: Mapping[str, tuple[Place, ...]], name: str) -> tuple[Place, ...]:
    if name not in places:
        msg = f"there is no {name} here"
        raise ValueError(msg)
    return places[name]


def _check(part: Part, place: Place) -> None:
    bits, values, indices = place.bits(), part.values, part.indices
    if bits.dtype != values.dtype:
        msg = f"{part.name} has {bits.dtype} here, {values.dtype} in the change"
        raise ValueError(msg)
    if indices is None and len(values) != place.size:
        msg = f"{part.name} has {place.size} elements here, {len(values)} in the change"
        raise ValueError(msg)
    if indices is not None and len(indices):
        least, most = (int(one) for one in indices.aminmax())
        if least < 0 or most >= place.size:
            msg = f"{part.name} has {place.size} elements, the change {least} to {most}"
            raise ValueError(msg)

"""The change of a whole state: one per tensor, the root it starts from and the root it leads to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinsmith.weights.change import Change


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

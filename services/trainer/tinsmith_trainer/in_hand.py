"""The ops of one model in a trainer's hands, and how much memory those that wait may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinsmith.bus import Taken
    from tinsmith.messages.ops import Op

HELD_BYTES = 16 << 20
"""Of one model's waiting ops; those beyond it are read from the queue again in their turn."""


class InHand:
    """Taken ops by seq, from their arrival until they are finished."""

    def __init__(self, limit_bytes: int = HELD_BYTES) -> None:
        self._limit = limit_bytes
        self._taken: dict[int, Taken[Op]] = {}
        self.held_bytes = 0

    def __contains__(self, seq: int) -> bool:
        return seq in self._taken

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, seq: int, taken: Taken[Op]) -> None:
        """Keep ``taken``; its bytes too, if there is room. It replaces an earlier delivery."""
        self.remove(seq)
        if self.held_bytes + taken.size > self._limit:
            taken.shed()
        self.held_bytes += taken.size
        self._taken[seq] = taken

    def remove(self, seq: int) -> None:
        """It is finished."""
        if (taken := self._taken.pop(seq, None)) is not None:
            self.held_bytes -= taken.size

    def let_go(self) -> None:
        """Leave all to the next owner."""
        for taken in self._taken.values():
            taken.let_go()

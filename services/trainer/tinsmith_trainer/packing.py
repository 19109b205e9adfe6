"""How the datums of one op are laid out in passes over the model: pure, and a function of the op.

The plan never looks at anything but the lengths of this op's own datums. A tenant's numbers
therefore cannot depend on who else is training, and a replay of the log makes the same passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MicroBatch = tuple[int, ...]
"""Positions of datums in the op, longest first; rows are padded to the first one's length."""

_SMALLEST_BUCKET = 64  # tokens; below it, padding costs less than another pass


def plan(lengths: Sequence[int], token_budget: int) -> tuple[MicroBatch, ...]:
    """Split datums of these lengths (tokens) into passes of at most ``token_budget`` tokens.

    Padding counts towards the budget. A datum that is longer than the budget gets a pass of its
    own. Datums share a pass only within a bucket of similar lengths, so less than half of a row
    beyond the smallest bucket is ever padding.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[MicroBatch] = []
    rows: list[int] = []
    for row in longest_first:
        if rows and not _fits(lengths[row], lengths[rows[0]], len(rows), token_budget):
            batches.append(tuple(rows))
            rows = []
        rows.append(row)
    if rows:
        batches.append(tuple(rows))
    return tuple(batches)


def budget(lengths: Sequence[int], token_budget: int, ranks: int) -> int:
    """That of each pass of an op that ``ranks`` make: smaller for one that leaves some idle."""
    return token_budget if ranks == 1 else min(token_budget, -(-sum(lengths) // ranks))


def is_joint(batches: Sequence[tuple[int, int]], token_budget: int) -> bool:
    """Whether passes of these (rows, tokens of the longest) may be made as one.

    By the rules of ``plan``: within the budget, and of similar lengths.
    """
    rows, longest = sum(rows for rows, _ in batches), max(length for _, length in batches)
    is_similar = all(_bucket(length) == _bucket(longest) for _, length in batches)
    return is_similar and rows * longest <= token_budget


def _fits(length: int, longest: int, rows: int, token_budget: int) -> bool:
    return _bucket(length) == _bucket(longest) and (rows + 1) * longest <= token_budget


def _bucket(length: int) -> int:
    """The upper bound of the bucket of ``length``: 64, 96, 128, 192, 256, ..., two per octave."""
    bound = _SMALLEST_BUCKET
    while bound < length:
        middle = bound + bound // 2
        if length <= middle:
            return middle
        bound *= 2
    return bound

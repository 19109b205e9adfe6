"""What an op asks of a pass over the model, and where its rows lie in it.

A pass has the rows of one op, or those of several ops of different models, one after another. Rows
do not see each other: all that an op's numbers can depend on of the others is how many rows there
are and how long these are, its ``Frame``. An op that is repeated gets the same frame, filled up
with padding, and with it the same bits, without anything of those who were there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import ForwardBackwardDone, Frame, OptimStepDone
from tinsmith_trainer import packing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinsmith.messages.ops import OpResult
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.loss import Loss
    from tinsmith_trainer.microbatch import Scored
    from tinsmith_trainer.trainable import Trainable


class Past(NamedTuple):
    """How an op that is repeated was computed; the default for one that has no past."""

    frames: tuple[Frame | None, ...] = ()
    """Of each of its passes."""
    ranks: int | None = None
    """By how many."""
    by_pass: bool = False
    """Whether the gradients of passes were added up one by one."""
    norm_block: int | None = None
    """Of a step: how many numbers the blocks had of which its norm was made, 0 if it was of all."""

    @classmethod
    def of(cls, result: OpResult) -> Past:
        """What an op that ended as ``result`` is repeated with."""
        match result:
            case ForwardBackwardDone():
                return cls(result.frames, result.ranks, result.by_pass)
            case OptimStepDone():
                return cls(norm_block=result.norm_block)
            case _:
                return NEW


NEW = Past()


class Part(NamedTuple):
    """One op's rows in a pass."""

    tenant: Trainable
    rows: Sequence[Example]
    loss: Loss
    settings: Mapping[str, float]
    with_gradient: bool
    frame: Frame | None = None
    """The one it must have, of an op that is repeated."""

    @property
    def tokens(self) -> int:
        """Those that it is charged for."""
        return sum(map(len, self.rows))

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return max(map(len, self.rows))


class Made(NamedTuple):
    """A part's results by row, and its frame if the pass had others too."""

    scored: list[Scored]
    frame: Frame | None


Outcome = Made | Exception
"""Of a part: an error in one is none of the others'."""


def is_joint(parts: Sequence[Part], token_budget: int) -> bool:
    """Whether ``parts``, of different models, may share a pass."""
    if any(part.frame is not None for part in parts):
        return False
    if len({part.with_gradient for part in parts}) > 1:
        return False
    return packing.is_joint([(len(part.rows), part.longest) for part in parts], token_budget)


def frames(parts: Sequence[Part]) -> tuple[Frame, ...]:
    """Where the rows of each of ``parts`` lie in their pass."""
    if len(parts) == 1 and parts[0].frame is not None:
        return (parts[0].frame,)
    rows, length = sum(len(part.rows) for part in parts), max(part.longest for part in parts)
    found, first = [], 0
    for part in parts:
        found.append(Frame(rows=rows, first=first, length=length))
        first += len(part.rows)
    return tuple(found)


def check_frame(frame: Frame, part: Part, token_budget: int) -> None:
    """Raises InvalidRequest for a frame that ``part`` cannot have had."""
    fits = 0 <= frame.first <= frame.rows - len(part.rows) and part.longest <= frame.length
    if not fits or frame.rows * frame.length > token_budget:
        raise InvalidRequest(
            f"frames: {frame.rows} rows of {frame.length} tokens, of which {len(part.rows)} from "
            f"{frame.first} on, cannot be those of this request in passes of {token_budget} "
            "tokens; the log is damaged, or from a trainer with larger passes"
        )

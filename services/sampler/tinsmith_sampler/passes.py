"""What a pass computes, and the tensors that say so.

A pass is a list of pieces, each some tokens of one sequence; decoding is a pass of pieces of one
token. T = rows of the pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinsmith_sampler.attention import PassPlan, Segment, causal_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tinsmith_sampler.kv_cache import Extent, KvCache
    from tinsmith_sampler.lora_layers import Adapter


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Tokens ``position`` and on of the sequence that lies in ``extent``.

    ``wanted``: indices into ``tokens`` of those whose logits are needed.
    """

    tokens: NDArray[np.int32]
    position: int
    extent: Extent
    adapter: Adapter | None
    wanted: NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class PassInput:
    """A pass in the form that a model takes."""

    tokens: torch.Tensor  # int64 [1, T]
    positions: torch.Tensor  # int64 [1, T]
    plan: PassPlan

    def arguments(self) -> dict[str, object]:
        """What a Hugging Face model is called with."""
        return {
            "input_ids": self.tokens,
            "position_ids": self.positions,
            "use_cache": False,
            "plan": self.plan,
        }


def lay_out(pieces: Sequence[Piece], cache: KvCache, *, rows: int, device: str) -> PassInput:
    """The pieces one after the other, padded to at least ``rows`` rows.

    A padding row writes where nobody reads and sees nothing.
    """
    height = max(rows, sum(len(piece.tokens) for piece in pieces))
    tokens_T, positions_T = np.zeros(height, np.int64), np.zeros(height, np.int64)
    slots_T = np.full(height, cache.scratch, np.int64)
    segments: list[Segment] = []
    first = 0
    for piece in pieces:
        segments.append(segment := _segment(piece, first, device))
        first += segment.count
        tokens_T[segment.first : first] = piece.tokens
        positions_T[segment.first : first] = np.arange(segment.count) + piece.position
        slots_T[segment.first : first] = np.arange(segment.end - segment.count, segment.end)
    return PassInput(
        torch.from_numpy(tokens_T).to(device)[None],
        torch.from_numpy(positions_T).to(device)[None],
        PassPlan(cache, torch.from_numpy(slots_T).to(device), segments),
    )


def _segment(piece: Piece, first: int, device: str) -> Segment:
    count, start = len(piece.tokens), piece.extent.start
    mask = causal_mask(count, piece.position, device)
    return Segment(first, count, start, start + piece.position + count, mask)

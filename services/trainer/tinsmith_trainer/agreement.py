"""How far samplers and the trainer agree: figures of tokens that were scored again. Pure.

Of a drawn token there are three log-probabilities: the sampler's q, the trainer's p under the same
weights, and the trainer's now, under its present ones. p - q is *numerics*: other kernels, equal
weights. now - p is *staleness*: equal kernels, later weights. They add up to the difference that a
loss sees, and so do their k1; k3 is that of each part (see ``mismatch``).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tinsmith_trainer import mismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

Part = Literal["numerics", "staleness"]
PARTS: tuple[Part, ...] = ("numerics", "staleness")

WINDOW = 4096  # tokens


class Rescored(NamedTuple):
    """Log-probabilities of the drawn tokens of one continuation, all float32 [m]."""

    sampler: NDArray[np.float32]
    same: NDArray[np.float32]  # the trainer's, under the weights that drew
    present: NDArray[np.float32]  # the trainer's, under those that the model has now

    def drift(self, part: Part) -> NDArray[np.float64]:
        """By how much ``part`` moves each, float64 [m]."""
        later, before = (
            (self.same, self.sampler) if part == "numerics" else (self.present, self.same)
        )
        return later.astype(np.float64) - before


class Figures(NamedTuple):
    """Of one part, over a window of tokens."""

    tokens: int
    k1: float  # per token
    k3: float
    dlogp: float  # the largest


class Limits(NamedTuple):
    """What figures of one part may be."""

    k3: float
    dlogp: float

    def are_kept(self, figures: Figures) -> bool:
        """No number is over any limit."""
        return figures.k3 <= self.k3 and figures.dlogp <= self.dlogp


class Window:
    """One part of the newest continuations that have ``WINDOW`` tokens together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sums: deque[Mapping[str, float]] = deque()
        self.is_over = False
        """Whether the figures are over the limits."""

    def add(self, drift: NDArray[np.float64]) -> bool:
        """Take another continuation in; whether ``is_over`` has changed by that."""
        self._sums.append(mismatch.sums(drift))
        while self.figures.tokens - self._sums[0]["compared:sum"] >= WINDOW:
            self._sums.popleft()
        was_over, self.is_over = self.is_over, not self._limits.are_kept(self.figures)
        return was_over != self.is_over

    @property
    def figures(self) -> Figures:
        """Of all that is in the window."""
        tokens = sum(one["compared:sum"] for one in self._sums)
        return Figures(
            int(tokens),
            sum(one["kl_k1:sum"] for one in self._sums) / max(tokens, 1),
            sum(one["kl_k3:sum"] for one in self._sums) / max(tokens, 1),
            float(np.max([one["dlogp:max"] for one in self._sums], initial=0.0)),
        )

"""The score of a prompt: what is collected from its logits, stretch by stretch.

V = vocabulary, n = positions of one stretch of a prompt, k = tokens per position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tinsmith_sampler.drawing import draw_each, uniform
from tinsmith_sampler.engine import Scored, TopTokens
from tinsmith_sampler.tasks import Task

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from tinsmith_sampler.engine import Alternatives, Scoring, Targets
    from tinsmith_sampler.lora_layers import Adapter

FILLER = -99999.0
"""Log-probability of token 0 in a top-k row that was not computed."""


class Collector(Protocol):
    """Something that the logits of a prompt are needed for."""

    first: int
    """The first position of the prompt whose distribution it needs; the prompt's length: none."""

    def take(self, position: int, logits_nV: torch.Tensor, total_n1: torch.Tensor) -> None:
        """The distributions over ``position`` and those after it, and their logsumexp."""


class ScoreTask(Task[Scored]):
    """A prompt whose logits are needed."""

    def __init__(self, scoring: Scoring, adapter: Adapter | None, future: Future[Scored]) -> None:
        length = len(scoring.prompt)
        self._own = _Own(scoring)
        self._targets = None if scoring.targets is None else _Targets(scoring.targets, length)
        self._drawn = None if scoring.alternatives is None else _Drawn(scoring.alternatives, length)
        found = (self._own, self._targets, self._drawn)
        self._collectors: list[Collector] = [one for one in found if one is not None]
        first = min(one.first for one in self._collectors)
        super().__init__(scoring, adapter, future, needs_from=min(first, length) - 1)

    def restart(self) -> None:
        """It was sent back; what is computed again replaces what was collected."""

    def take(self, position: int, logits_nV: torch.Tensor) -> None:
        """Take the logits of ``position`` and those after it; each scores the token behind it."""
        count = min(len(logits_nV), len(self.tokens) - 1 - position)
        if count <= 0:
            return
        logits_nV = logits_nV[:count]
        total_n1 = torch.logsumexp(logits_nV, 1, keepdim=True)
        if not bool(torch.isfinite(total_n1).all()):
            raise self.not_finite()
        for one in self._collectors:
            skipped = max(one.first - (position + 1), 0)
            if skipped < count:
                one.take(position + 1 + skipped, logits_nV[skipped:], total_n1[skipped:])

    def result(self) -> Scored:
        """What was collected, once the whole prompt has been computed."""
        return Scored(
            logprobs=self._own.logprobs,
            topk=self._own.topk,
            targets=None if self._targets is None else self._targets.logprobs,
            alternatives=None if self._drawn is None else self._drawn.tokens,
            cached_tokens=self.cached_tokens,
        )


class _Own:
    """The log-probabilities of the prompt's own tokens, and the likeliest in their place."""

    def __init__(self, scoring: Scoring) -> None:
        length = len(scoring.prompt)
        self.first = length - (length - 1 if scoring.last_n is None else scoring.last_n)
        self._tokens = scoring.prompt
        self.logprobs = np.full(length, np.nan, dtype=np.float32)
        self.topk: TopTokens | None = None
        if k := scoring.topk:
            self.topk = _top_tokens(length, k, FILLER)

    def take(self, position: int, logits_nV: torch.Tensor, total_n1: torch.Tensor) -> None:
        rows = slice(position, position + len(logits_nV))
        targets = torch.from_numpy(self._tokens[rows].astype(np.int64)).to(logits_nV.device)
        chosen_n1 = logits_nV.gather(1, targets[:, None]) - total_n1
        self.logprobs[rows] = chosen_n1[:, 0].cpu().numpy()
        if self.topk is not None:
            values_nk, ids_nk = torch.topk(logits_nV, self.topk.token_ids.shape[1], dim=1)
            self.topk.token_ids[rows] = ids_nk.cpu().numpy()
            self.topk.logprobs[rows] = (values_nk - total_n1).cpu().numpy()


class _Targets:
    """The log-probabilities of other tokens."""

    def __init__(self, targets: Targets, length: int) -> None:
        self._asked = np.flatnonzero(targets.tokens >= 0)  # places among the cells
        self._positions = targets.positions[self._asked]  # rising
        self._tokens = targets.tokens[self._asked]
        self.first = int(self._positions[0]) if len(self._asked) else length
        self.logprobs: NDArray[np.float32] = np.zeros(len(targets.tokens), dtype=np.float32)

    def take(self, position: int, logits_nV: torch.Tensor, total_n1: torch.Tensor) -> None:
        begin, end = np.searchsorted(self._positions, (position, position + len(logits_nV)))
        rows = torch.from_numpy(self._positions[begin:end] - position).to(logits_nV.device)
        tokens = torch.from_numpy(self._tokens[begin:end]).to(logits_nV.device)
        found = logits_nV[rows, tokens] - total_n1[rows, 0]
        self.logprobs[self._asked[begin:end]] = found.cpu().numpy()


class _Drawn:
    """Draws in place of the prompt's tokens; those of a position depend on the seeds and it."""

    first = 1

    def __init__(self, alternatives: Alternatives, length: int) -> None:
        self._asked = alternatives
        self.tokens = _top_tokens(length - 1, len(alternatives.seeds), 0.0)

    def take(self, position: int, logits_nV: torch.Tensor, total_n1: torch.Tensor) -> None:
        at = range(position, position + len(logits_nV))
        chances = [[uniform(seed, place) for seed in self._asked.seeds] for place in at]
        chances_nk = torch.tensor(chances, dtype=torch.float64, device=logits_nV.device)
        ids_nk = draw_each(logits_nV, self._asked.temperature, chances_nk)
        rows = slice(position - 1, position - 1 + len(logits_nV))
        self.tokens.token_ids[rows] = ids_nk.cpu().numpy()
        self.tokens.logprobs[rows] = (logits_nV.gather(1, ids_nk) - total_n1).cpu().numpy()


def _top_tokens(length: int, k: int, filler: float) -> TopTokens:
    return TopTokens(
        np.zeros((length, k), dtype=np.int32), np.full((length, k), filler, dtype=np.float32)
    )

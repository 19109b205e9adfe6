"""A prompt to score as an SGLang server is asked for it, and what its answers make of the score.

The server scores the same tokens at every position, so a prompt with other targets at each is asked
for in stretches: short ones, since each position answers for the targets of all of its stretch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import NotSupported
from tinsmith_sampler.engine import Scored, TopTokens
from tinsmith_sampler.scores import FILLER
from tinsmith_sampler.sglang.failures import SglangAborted
from tinsmith_sampler.sglang.logprobs import chosen, top
from tinsmith_sampler.sglang.wire import Generate, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith_sampler.engine import Scoring, Targets
    from tinsmith_sampler.sglang.wire import Answer

_MOST = 1 << 17
"""Log-probabilities of targets in one answer; each is some thirty bytes of JSON."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Positions [first, end) of a prompt, for which one request asks; ``first`` is at least 1."""

    first: int
    end: int
    targets: tuple[int, ...] = ()  # tokens to score at each of them; none: the prompt's own

    def body(self, scoring: Scoring, adapter: str | None) -> Generate:
        """What the server is asked. It leaves out the first log-probability that it could give."""
        is_own = not self.targets
        return Generate(
            rid=scoring.request_id,
            input_ids=scoring.prompt[: self.end].tolist(),
            sampling_params=Sampling(sampling_seed=0, max_new_tokens=0),
            lora_path=adapter,
            logprob_start_len=self.first - 1,
            top_logprobs_num=scoring.topk if is_own else 0,
            token_ids_logprob=None if is_own else list(self.targets),
        )


def check(scoring: Scoring) -> None:
    """Raises NotSupported for what no request to the server can ask."""
    if scoring.alternatives is not None:
        raise NotSupported(
            "prompt_alt_tokens_k: the SGLang engine draws tokens behind a prompt only, not in "
            "place of its own; sample one token from each beginning of the prompt, or ask for "
            'topk_prompt_logprobs, or serve the model with [sampler] engine = "torch"'
        )


class Score:
    """The score of one prompt while its parts come in."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring
        length = len(scoring.prompt)
        self._logprobs = np.full(length, np.nan, dtype=np.float32)
        self._topk = _unknown(length, scoring.topk) if scoring.topk else None
        self._targets: np.ndarray[tuple[int], np.dtype[np.float32]] | None = None
        if scoring.targets is not None:
            self._targets = np.zeros(len(scoring.targets.tokens), dtype=np.float32)
        self._cached: list[int] = []

    def parts(self) -> list[Part]:
        """What is to be asked for."""
        length, last_n = len(self._scoring.prompt), self._scoring.last_n
        first = max(1, length - (length if last_n is None else last_n))
        own = [Part(first, length)] if first < length else []
        targets = self._scoring.targets
        return own if targets is None else [*own, *_stretches(targets)]

    def take(self, part: Part, answer: Answer) -> None:
        """Add what one part has; NotFinite, SglangAborted, SglangGone."""
        told = answer.meta_info
        if told.finish_reason is not None and told.finish_reason.type == "abort":
            raise SglangAborted(told.finish_reason.message or "without a reason")
        self._cached.append(told.cached_tokens)
        count = part.end - part.first
        if part.targets:
            found = top((told.input_token_ids_logprobs or [])[1:], count, len(part.targets))
            self._fill_targets(part, found)
            return
        rows = slice(part.first, part.end)
        self._logprobs[rows] = chosen((told.input_token_logprobs or [])[1:], count)
        if self._topk is not None:
            found = top((told.input_top_logprobs or [])[1:], count, self._scoring.topk)
            self._topk.token_ids[rows] = found.token_ids
            self._topk.logprobs[rows] = found.logprobs

    def result(self) -> Scored:
        """The score, once all parts are there."""
        return Scored(
            logprobs=self._logprobs,
            topk=self._topk,
            targets=self._targets,
            cached_tokens=min(self._cached, default=0),
        )

    def _fill_targets(self, part: Part, found: TopTokens) -> None:
        asked = self._scoring.targets
        if asked is None or self._targets is None:
            return
        inside = (asked.positions >= part.first) & (asked.positions < part.end)
        cells = np.flatnonzero(inside & (asked.tokens >= 0))
        rows = asked.positions[cells] - part.first
        columns = np.searchsorted(part.targets, asked.tokens[cells])
        self._targets[cells] = found.logprobs[rows, columns]


def _stretches(targets: Targets) -> Iterator[Part]:
    """Parts that hold every target, none of them with more than ``_MOST`` answers, if possible."""
    asked = targets.tokens >= 0
    positions, tokens = targets.positions[asked].tolist(), targets.tokens[asked].tolist()
    begun: set[int] = set()
    first = end = 0
    for position, token in zip(positions, tokens, strict=True):
        wider = (position + 1 - first) * (len(begun) + (token not in begun))
        if begun and position >= end and wider > _MOST:
            yield Part(first, end, tuple(sorted(begun)))
            begun = set()
        if not begun:
            first = position
        begun.add(token)
        end = position + 1
    if begun:
        yield Part(first, end, tuple(sorted(begun)))


def _unknown(length: int, k: int) -> TopTokens:
    return TopTokens(
        np.zeros((length, k), dtype=np.int32), np.full((length, k), FILLER, dtype=np.float32)
    )

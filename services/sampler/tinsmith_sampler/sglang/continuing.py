"""A row as an SGLang server is asked for it, and what its answers make of the row.

Where a row ends is decided here, by the ``Stopper`` that the torch engine has too. The server is
told of the same ends, so that it computes no further; but it looks for a string in as few tokens as
its tokenizer spells it with, and with ``ignore_eos`` it passes over stop tokens as well. What it
drew beyond an end is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import ServerError
from tinsmith_sampler.engine import Drawn, Generated, TopTokens
from tinsmith_sampler.sglang.failures import SglangAborted
from tinsmith_sampler.sglang.logprobs import NotFinite, chosen, top
from tinsmith_sampler.sglang.routes import routes
from tinsmith_sampler.sglang.wire import Generate, Sampling
from tinsmith_sampler.stopping import Stopper, StopText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith_sampler.engine import Experts, Row, StopReason
    from tinsmith_sampler.sglang.base_model import BaseModel
    from tinsmith_sampler.sglang.wire import Answer, FinishReason

_NAN = "NaN happened"
"""What a server says has ended a row for which no token could be drawn."""


def body(row: Row, model: BaseModel, adapter: str | None) -> Generate:
    """What the server is asked; ``adapter`` is the name that its client knows."""
    params = row.params
    stop_tokens = () if params.ignore_eos else model.eos_tokens.union(params.stop_tokens)
    return Generate(
        rid=row.request_id,
        input_ids=row.prompt.tolist(),
        sampling_params=Sampling(
            sampling_seed=row.seed,
            max_new_tokens=row.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop=params.stop_strings,
            stop_token_ids=tuple(sorted(stop_tokens)),
            ignore_eos=params.ignore_eos,
        ),
        lora_path=adapter,
        top_logprobs_num=row.topk,
        return_routed_experts=row.routed_experts,
    )


def needs_stream(row: Row) -> bool:
    """Whether somebody listens, or the server might pass over an end."""
    params = row.params
    misses_tokens = params.ignore_eos and bool(params.stop_tokens)
    return row.tell is not None or bool(params.stop_strings) or misses_tokens


class Continuation:
    """One row while its answers come in; each answer has what is new since the one before."""

    def __init__(self, row: Row, model: BaseModel) -> None:
        self._row = row
        self._stopper = _stopper(row, model)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._topk: list[TopTokens] = []
        self._experts: Experts | None = None
        self._mixture = model.mixture
        self._cached_tokens = 0
        self._reason: StopReason | None = None

    @property
    def is_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._reason is not None

    def take(self, answer: Answer) -> Drawn | None:
        """Add what an answer has; it is to be told, unless it is the end.

        Raises:
            NotFinite: a log-probability is not finite.
            SglangAborted: the server has given the row up.
        """
        told = answer.meta_info
        start = len(self._tokens)
        count = 0 if self.is_ended else self._until_end(answer.output_ids)
        self._tokens += answer.output_ids[:count]
        self._logprobs += chosen(told.output_token_logprobs, count).tolist()
        if self._row.topk:
            self._topk.append(top(told.output_top_logprobs, count, self._row.topk))
        self._cached_tokens = told.cached_tokens
        self._check_whole(told.finish_reason)
        if told.routed_experts is not None:
            self._experts = routes(told.routed_experts, self._mixture, self._computed)
        if told.finish_reason is not None and not self.is_ended:
            self._reason = self._ended(told.finish_reason)
        return None if self.is_ended or not count else self._drawn(start)

    def result(self) -> Generated:
        """The row, once it has ended."""
        if self._reason is None:
            raise ServerError("the SGLang server stopped in the middle of a row; send it again")
        if self._row.routed_experts and self._experts is None:
            raise ServerError(
                "the SGLang server ended a row without telling where its tokens went; send it again"
            )
        return Generated(
            tokens=np.array(self._tokens, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            stop_reason=self._reason,
            topk=_joined(self._topk),
            experts=self._experts,
            cached_tokens=self._cached_tokens,
        )

    @property
    def _computed(self) -> int:
        """Tokens that were, of prompt and row."""
        return len(self._row.prompt) + len(self._tokens) - 1

    def _until_end(self, tokens: Sequence[int]) -> int:
        """How many of these belong to the row."""
        for count, token in enumerate(tokens, 1):
            self._reason = self._stopper.after(token)
            if self._reason is not None:
                return count
        return len(tokens)

    def _check_whole(self, reason: FinishReason | None) -> None:
        """A row that was given up lacks tokens or, behind an end of ours, where they went."""
        is_missed = not self.is_ended or self._row.routed_experts
        if reason is not None and reason.type == "abort" and is_missed:
            raise SglangAborted(reason.message or "without a reason")

    def _ended(self, reason: FinishReason) -> StopReason:
        """Why the server ended it, where we would have gone on."""
        if reason.matched == _NAN:
            raise NotFinite
        if reason.type == "length":
            raise ServerError(
                f"the SGLang server drew {len(self._tokens)} tokens where {self._row.max_tokens} "
                "were asked for; its cache has no room for more, raise the sampler's cache_tokens"
            )
        return "stop"  # at an end of texts that only the server's copy of the model names

    def _drawn(self, start: int) -> Drawn:
        return Drawn(
            index=self._row.index,
            start=start,
            tokens=np.array(self._tokens[start:], dtype=np.int32),
            logprobs=np.array(self._logprobs[start:], dtype=np.float32),
            topk=self._topk[-1] if self._topk else None,
        )


def _stopper(row: Row, model: BaseModel) -> Stopper:
    params = row.params
    eos = frozenset[int]() if params.ignore_eos else model.eos_tokens
    text = None
    if params.stop_strings and model.to_text is not None:
        text = StopText(params.stop_strings, model.to_text)
    return Stopper(max_tokens=row.max_tokens, stop_tokens=eos.union(params.stop_tokens), text=text)


def _joined(parts: Sequence[TopTokens]) -> TopTokens | None:
    if not parts:
        return None
    return TopTokens(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
    )

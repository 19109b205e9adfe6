"""What a sampling request may ask for; everything else is refused before any engine sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest, TooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from tinsmith.messages.sampling import Sample, SamplingParams, TargetTokens

MOST_ROUTES = 256 << 20
"""Bytes of the routed experts of one answer, which sampler and gateway hold more than once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an engine and its operator allow."""

    vocab_size: int
    context_length: int  # tokens of prompt and continuation together
    max_samples: int = 1024  # continuations of one request
    max_topk: int = 128


def check(sample: Sample, limits: Limits) -> NDArray[np.int32]:
    """The prompt of a request that can be served, int32 [n]; InvalidRequest otherwise."""
    prompt = _prompt(sample.prompt, limits)
    _within("num_samples", sample.num_samples, 1, limits.max_samples)
    most = min(limits.max_topk, limits.vocab_size)
    _within("topk_prompt_logprobs", sample.topk_prompt_logprobs, 0, most)
    _within("topk_sample_logprobs", sample.topk_sample_logprobs, 0, most)
    _within("prompt_alt_tokens_k", sample.prompt_alt_tokens_k, 0, most)
    if sample.target_tokens is not None:
        _targets(sample.target_tokens, len(prompt), limits)
    if sample.prompt_logprobs_last_n is not None:
        _last_n(sample.prompt_logprobs_last_n, len(prompt))
    _params(sample.params, limits)
    max_tokens(sample.params, len(prompt), limits)
    return prompt


def max_tokens(params: SamplingParams, prompt_length: int, limits: Limits) -> int:
    """Tokens that may be drawn: those asked for, or else what the context has room for."""
    room = limits.context_length - prompt_length
    asked = 1 if params.max_tokens is None else params.max_tokens
    if asked < 1:
        raise InvalidRequest(f"max_tokens: {asked} is below 1; leave it out to use the context")
    if asked > room:
        raise InvalidRequest(
            f"max_tokens: a prompt of {prompt_length} tokens and {asked} to draw are "
            f"{prompt_length + asked}, over the context length of {limits.context_length}; "
            "shorten the prompt or lower max_tokens"
        )
    return room if params.max_tokens is None else asked


def check_routes(sample: Sample, prompt_length: int, limits: Limits, route_bytes: int) -> None:
    """TooLarge when the routed experts asked for could be too many; ``route_bytes`` of a token."""
    if not sample.routed_experts:
        return
    tokens = prompt_length + max_tokens(sample.params, prompt_length, limits) - 1
    size = sample.num_samples * tokens * route_bytes
    if size > MOST_ROUTES:
        raise TooLarge(
            f"return_routed_experts: {sample.num_samples} continuations of up to {tokens} tokens "
            f"each, the prompt's among them, at {route_bytes} bytes a token are {size} bytes, over "
            f"the limit of {MOST_ROUTES}; lower n or max_tokens, shorten the prompt, or ask in "
            "several requests"
        )


def _prompt(data: bytes, limits: Limits) -> NDArray[np.int32]:
    if not data:
        raise InvalidRequest("prompt: it is empty; give at least one token, e.g. the BOS token")
    if len(data) % 4:
        raise InvalidRequest(f"prompt: {len(data)} bytes are not a whole number of int32 tokens")
    prompt = np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
    _tokens("prompt", prompt, limits)
    return prompt


def _tokens(field: str, tokens: NDArray[np.int32], limits: Limits) -> None:
    bad = np.flatnonzero((tokens < 0) | (tokens >= limits.vocab_size))
    if bad.size:
        raise InvalidRequest(
            f"{field}: token {tokens[bad[0]]} at position {bad[0]} is outside the vocabulary of "
            f"{limits.vocab_size}; encode with the tokenizer of this base model"
        )


def _targets(asked: TargetTokens, length: int, limits: Limits) -> None:
    tokens = np.frombuffer(asked.tokens, dtype="<i4")
    if tokens.size and int(tokens.max()) >= limits.vocab_size:
        raise InvalidRequest(
            f"target_prompt_logprobs: token {tokens.max()} is outside the vocabulary of "
            f"{limits.vocab_size}; encode with the tokenizer of this base model"
        )
    most = limits.max_topk * length
    if (count := int((tokens >= 0).sum())) > most:
        raise InvalidRequest(
            f"target_prompt_logprobs: {count} tokens to score are over {most}, "
            f"{limits.max_topk} for each of the prompt; ask for fewer, -1 skips a cell"
        )


def _last_n(last_n: int, length: int) -> None:
    if not 1 <= last_n < length:
        raise InvalidRequest(
            f"prompt_logprobs_last_n: {last_n} is not in 1..{length - 1} for a prompt of {length} "
            "tokens (the first has no log-probability); leave it out to score them all"
        )


def _params(params: SamplingParams, limits: Limits) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidRequest(
            f"temperature: {params.temperature} is not a finite number from 0 up; 0 is greedy"
        )
    if params.top_k != -1 and params.top_k < 1:
        raise InvalidRequest(f"top_k: {params.top_k} is neither -1 (off) nor at least 1")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest(f"top_p: {params.top_p} is not in (0, 1]; 1 is off")
    if "" in params.stop_strings:
        raise InvalidRequest("stop: an empty string would end every text; remove it")
    _stop_tokens(params.stop_tokens, limits)


def _stop_tokens(tokens: Iterable[int], limits: Limits) -> None:
    for token in tokens:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                f"stop: token {token} is outside the vocabulary of {limits.vocab_size}"
            )


def _within(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"{field}: {value} is not in {least}..{most}")

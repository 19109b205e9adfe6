"""``asample`` as a ``Sample`` message; every check that needs no model is made here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tinsmith.errors import InvalidRequest, NotSupported, TooLarge
from tinsmith.messages import sampling
from tinsmith_gateway.wire.seeds import seed_for
from tinsmith_gateway.wire.target_tokens import target_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tinsmith_gateway.wire import requests
    from tinsmith_gateway.wire.requests import Chunk

MAX_INT32 = 2**31 - 1
MAX_STOPS = 256
MAX_STOP = 1024  # characters


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask for."""

    max_samples: int
    max_topk: int
    vocab_size: int | None = None  # None: not known, the sampler will tell
    context_length: int | None = None
    max_tokens: int = MAX_INT32  # of the prompt and all continuations


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampling session samples from."""

    request_id: str
    sampler_id: str
    base_model: str
    adapter: sampling.AdapterRef | None


def sample(asked: requests.Sample, target: Target, limits: Limits) -> sampling.Sample:
    """The bus message; InvalidRequest or NotSupported name the field that is wrong.

    ``record_stability_info`` is a hint, and nothing is recorded beyond what the log keeps.
    """
    prompt = _prompt(asked.prompt.chunks)
    _check_prompt(prompt, limits)
    _check_range("num_samples", asked.num_samples, 1, limits.max_samples)
    _check_tokens(asked, len(prompt), limits)
    topk_prompt = asked.topk_prompt_logprobs or 0
    topk_sample = asked.topk_sample_logprobs or 0
    _check_range("topk_prompt_logprobs", topk_prompt, 0, limits.max_topk)
    _check_range("topk_sample_logprobs", topk_sample, 0, limits.max_topk)
    alternatives = asked.prompt_alt_tokens_k or 0
    _check_range("prompt_alt_tokens_k", alternatives, 0, limits.max_topk)
    if (last_n := asked.prompt_logprobs_last_n) is not None:
        _check_range("prompt_logprobs_last_n", last_n, 1, max(len(prompt) - 1, 1))
    return sampling.Sample(
        request_id=target.request_id,
        sampler_id=target.sampler_id,
        seq=asked.seq_id,
        base_model=target.base_model,
        adapter=target.adapter,
        prompt=prompt.tobytes(),
        num_samples=asked.num_samples,
        params=_params(asked.sampling_params, target.request_id),
        prompt_logprobs=bool(asked.prompt_logprobs),
        topk_prompt_logprobs=topk_prompt,
        topk_sample_logprobs=topk_sample,
        prompt_logprobs_last_n=last_n,
        target_tokens=_targets(asked, prompt, limits),
        prompt_alt_tokens_k=alternatives,
    )


def _targets(
    asked: requests.Sample, prompt: NDArray[np.int32], limits: Limits
) -> sampling.TargetTokens | None:
    if asked.target_prompt_logprobs is None:
        return None
    vocab_size = MAX_INT32 if limits.vocab_size is None else limits.vocab_size
    return target_tokens(asked.target_prompt_logprobs, len(prompt), vocab_size)


def _prompt(chunks: list[Chunk]) -> NDArray[np.int32]:
    """All chunks as one array, int32 [n], n > 0."""
    parts = [_chunk_tokens(chunk, f"prompt.chunks[{i}]") for i, chunk in enumerate(chunks)]
    if not any(len(part) for part in parts):
        raise InvalidRequest("prompt: has no tokens; send at least one, e.g. the BOS token")
    return np.concatenate(parts)


def _chunk_tokens(chunk: Chunk, where: str) -> NDArray[np.int32]:
    if chunk.type != "encoded_text":
        raise NotSupported(
            f"{where}: a chunk of kind {chunk.type!r} is not supported by this server yet; "
            "send text as tokens"
        )
    try:
        return np.array(chunk.tokens, dtype="<i4")
    except OverflowError as error:
        raise InvalidRequest(f"{where}.tokens: not all are 32-bit token ids ({error})") from error


def _check_prompt(prompt: NDArray[np.int32], limits: Limits) -> None:
    highest = MAX_INT32 if limits.vocab_size is None else limits.vocab_size - 1
    bad = np.flatnonzero((prompt < 0) | (prompt > highest))
    if len(bad):
        raise InvalidRequest(
            f"prompt[{bad[0]}]: token {prompt[bad[0]]} is outside 0 to {highest}; "
            "use the model's own tokenizer"
        )
    if limits.context_length is not None and len(prompt) > limits.context_length:
        raise InvalidRequest(
            f"prompt: {len(prompt)} tokens are over the model's context of "
            f"{limits.context_length}; shorten it"
        )


def _check_tokens(asked: requests.Sample, prompt: int, limits: Limits) -> None:
    longest = asked.sampling_params.max_tokens or limits.context_length or 0
    if limits.context_length is not None:
        longest = min(longest, limits.context_length - prompt)
    total = prompt + asked.num_samples * max(longest, 0)
    if total > limits.max_tokens:
        raise TooLarge(
            f"num_samples, max_tokens: {asked.num_samples} continuations of {longest} tokens make "
            f"{total} with the prompt, over the limit of {limits.max_tokens}; ask for fewer or "
            "shorter ones, or raise gateway.max_request_tokens"
        )


def _params(asked: requests.SamplingParams, request_id: str) -> sampling.SamplingParams:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    top_k = -1 if asked.top_k is None else asked.top_k
    if not 0.0 <= temperature < math.inf:
        raise InvalidRequest(
            f"sampling_params.temperature: {temperature} is not a finite number from 0 (greedy)"
        )
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequest(f"sampling_params.top_p: {top_p} is not above 0 and up to 1 (off)")
    if top_k != -1:
        _check_range("sampling_params.top_k", top_k, 1, MAX_INT32, hint="; -1 is off")
    if asked.max_tokens is not None:
        _check_range("sampling_params.max_tokens", asked.max_tokens, 1, MAX_INT32)
    tokens, strings = _stops(asked.stop)
    return sampling.SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed_for(asked.seed, request_id),
        stop_tokens=tokens,
        stop_strings=strings,
        ignore_eos=asked.stop == [],
    )


def _stops(stop: str | list[str | int] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids and strings that end a sequence; one of the two is empty."""
    given = [stop] if isinstance(stop, str) else stop or []
    if len(given) > MAX_STOPS or any(len(x) > MAX_STOP for x in given if isinstance(x, str)):
        raise InvalidRequest(
            f"sampling_params.stop: over {MAX_STOPS} items, or one over {MAX_STOP} characters; "
            "each is looked for after every token, give fewer or shorter ones"
        )
    strings = tuple(item for item in given if isinstance(item, str))
    tokens = tuple(item for item in given if isinstance(item, int))
    if strings and tokens:
        raise InvalidRequest("sampling_params.stop: mixes strings and token ids; use one kind")
    if "" in strings:
        raise InvalidRequest("sampling_params.stop: the empty string would stop everywhere")
    for token in tokens:
        _check_range("sampling_params.stop", token, 0, MAX_INT32)
    return tokens, strings


def _check_range(field: str, value: int, low: int, high: int, *, hint: str = "") -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field}: {value} is outside {low} to {high}{hint}")

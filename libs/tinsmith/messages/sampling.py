"""Sampling work: produced by the gateway, consumed by any sampler of the pool."""

from __future__ import annotations

import msgspec

from tinsmith.messages.base import BlobRef, Failed, Message


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable adapter weights: ``version`` names these bits for ever.

    ``files`` holds ``adapter_model.safetensors`` and ``adapter_config.json`` (PEFT format).
    """

    version: str
    files: dict[str, BlobRef]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens; the defaults sample from the model's own distribution."""

    max_tokens: int | None = None  # None: up to the context length
    temperature: float = 1.0  # 0: greedy
    top_k: int = -1  # -1: off
    top_p: float = 1.0
    seed: int | None = None  # None: drawn by the gateway, so that a redelivery repeats it
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # only true for an explicit empty stop list


class Sample(Message, frozen=True, kw_only=True):
    """Draw ``num_samples`` continuations of one prompt, or score the prompt, or both."""

    request_id: str
    sampler_id: str
    seq: int
    base_model: str
    adapter: AdapterRef | None = None  # None: the base model itself
    prompt: bytes  # int32 [n]
    num_samples: int = 1
    params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None


class TopK(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The k likeliest tokens at each of ``length`` positions, row-major."""

    token_ids: bytes  # int32 [length, k]
    logprobs: bytes  # float32 [length, k]
    k: int
    length: int


class Sequence(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One continuation, its terminator included; logprobs are raw (temperature 1)."""

    tokens: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]
    stop_reason: str  # "stop" or "length"
    topk: TopK | None = None


class SampleDone(Message, frozen=True, kw_only=True):
    """The sequences, in order of their index, and what produced them."""

    request_id: str
    sequences: tuple[Sequence, ...] = ()
    prompt_logprobs: bytes | None = None  # float32 [n], NaN where not computed
    topk_prompt_logprobs: TopK | None = None
    prompt_cache_hit_tokens: int = 0
    weight_version: str = ""
    plane: str = ""  # e.g. "torch/cpu/float32"


class SampleFailed(Message, frozen=True, kw_only=True):
    """The request could not be served."""

    request_id: str
    failure: Failed


SampleResult = SampleDone | SampleFailed

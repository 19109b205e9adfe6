"""The sampler's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tinsmith.config import Section

LogPolicy = Literal["off", "digest", "full"]


class SamplerConfig(Section, frozen=True, kw_only=True):
    """Settings of ``[sampler]``."""

    model: str = ""
    """Name of the base model to sample from, one of ``[[models]]``; empty for the first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; ``auto`` takes a GPU when there is one."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """CPU threads of torch; 0 for half of the cores."""
    max_rows: Annotated[int, Meta(ge=1)] = 32
    """Continuations that are drawn at the same time; more wait their turn."""
    cache_tokens: Annotated[int, Meta(ge=128)] = 32768
    """Tokens of all rows together that the key-value cache holds."""
    max_adapters: Annotated[int, Meta(ge=1)] = 16
    """Adapters held in memory; the least recently used one makes room."""
    max_whole: Annotated[int, Meta(ge=1)] = 1
    """Models that were trained whole, held beside the base model where that has ``full = true``;
    each takes the memory of the base model and its cache once more."""
    max_requests: Annotated[int, Meta(ge=1)] = 256
    """Requests taken from the queue at once, so that other samplers get their share."""
    max_samples: Annotated[int, Meta(ge=1)] = 1024
    """Most continuations of one request."""
    max_topk: Annotated[int, Meta(ge=0)] = 128
    """Most alternatives per position."""
    log: LogPolicy = "digest"
    """What the log of samples keeps of an answer: ``off`` nothing, ``digest`` settings and digests,
    by which a copy of it can be proved, ``full`` prompt and answer too, so that ``tinsmith replay
    --sampling`` can draw it again."""

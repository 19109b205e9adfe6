"""The sampler's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tinsmith.config import Section
from tinsmith.pools import POOL_PATTERN

LogPolicy = Literal["off", "digest", "full"]
EngineName = Literal["torch", "sglang"]


class SamplerConfig(Section, frozen=True, kw_only=True):
    """Settings of ``[sampler]``."""

    model: str = ""
    """Name of the base model to sample from, one of ``[[models]]``; empty for the first."""
    engine: EngineName = "torch"
    """What computes: ``torch``, built in, or ``sglang``, an SGLang server (``docs/sglang.md``)."""
    sglang_python: str = ""
    """A Python that has SGLang: its server is started beside the sampler, and again when it dies.
    Empty: the environment that ``make sglang`` builds."""
    sglang_url: str = ""
    """A server of SGLang that somebody else runs, for this sampler alone, in place of one of our
    own; ``docs/sglang.md`` names the options that it needs."""
    sglang_api_key: str = ""
    """The ``--api-key`` of the server at ``sglang_url``."""
    sglang_args: tuple[str, ...] = ()
    """More arguments for a server of our own; they win over ours."""
    routed_experts: bool = False
    """Whether a server of our own is started so that requests may ask which experts of a mixture
    tokens were sent to. The built-in engine always tells."""
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
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024)] = 128
    """Highest rank of an adapter. SGLang reserves memory for it, for each adapter of a pass."""
    max_whole: Annotated[int, Meta(ge=1)] = 1
    """Models that were trained whole, held beside the base model where that has ``full = true``;
    each takes the memory of the base model and its cache once more."""
    max_requests: Annotated[int, Meta(ge=1)] = 256
    """Requests taken from the queue at once, so that other samplers get their share."""
    pool: Annotated[str, Meta(pattern=POOL_PATTERN)] = ""
    """Label of the samplers that are like this one: other engine, dtype or device, other label.
    Requests go to those without one unless another is named for them (``docs/running.md``)."""
    drain_s: Annotated[float, Meta(ge=0)] = 5.0
    """When it is told to stop: how long it goes on with what it has begun, before it gives that
    back to the queue too."""
    max_samples: Annotated[int, Meta(ge=1)] = 1024
    """Most continuations of one request."""
    max_topk: Annotated[int, Meta(ge=0)] = 128
    """Most alternatives per position."""
    log: LogPolicy = "digest"
    """What the log of samples keeps of an answer: ``off`` nothing, ``digest`` settings and digests,
    by which a copy of it can be proved, ``full`` prompt and answer too, so that ``tinsmith replay
    --sampling`` can draw it again."""
    canary_share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """The share of continuations that the trainer scores again, 30 a minute at most; 0 for none
    (``docs/agreement.md``)."""

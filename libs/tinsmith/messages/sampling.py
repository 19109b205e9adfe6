"""Sampling work: produced by the gateway, consumed by any sampler of the pool."""

from __future__ import annotations

import msgspec

from tinsmith.messages.base import BlobRef, Failed, Message
from tinsmith.messages.weights import PublishedVersion


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable adapter weights: ``version`` names these bits for ever.

    ``files`` holds ``adapter_model.safetensors`` and ``adapter_config.json`` (PEFT format), or
    those of a whole model (Hugging Face format), which has ``config.json``.
    """

    version: str
    files: dict[str, BlobRef]
    model_id: str = ""  # the run that trained them
    op_seq: int | None = None  # of the op that saved them
    published: PublishedVersion | None = None  # the same weights on their lineage


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


class Cells(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Cells of a matrix whose row i stands for position i + 1 of a prompt; row by row."""

    width: int
    bounds: bytes = b""  # int64 [rows + 1]: the first cell of each row; empty: every cell is there
    columns: bytes = b""  # int64 [cells], with ``bounds``


class TargetTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens to score in place of the prompt's own."""

    tokens: bytes  # int32 [cells]; -1: nothing to score
    cells: Cells


class TargetScores(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Raw log-probabilities of ``TargetTokens``."""

    logprobs: bytes  # float32 [cells]; 0 where there was nothing to score
    cells: Cells


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
    target_tokens: TargetTokens | None = None
    prompt_alt_tokens_k: int = 0  # draws at each position of the prompt after the first
    routed_experts: bool = False  # of a mixture: tell which of them each token was sent to
    tell: str = ""  # the gateway that is told of tokens while they are drawn; empty: none


class TopK(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """k tokens at each of ``length`` positions, the likeliest first unless drawn; row-major."""

    token_ids: bytes  # int32 [length, k]
    logprobs: bytes  # float32 [length, k]
    k: int
    length: int


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which experts tokens were sent to: of each layer that has some, in the router's order."""

    experts: bytes  # unsigned [length, layers, k]
    width: int  # bytes of each: 1, or 2 where layers have more than 256
    length: int  # tokens of the prompt and the continuation, but for the last, which goes nowhere
    layers: int
    k: int


class Sequence(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One continuation, its terminator included; logprobs are raw (temperature 1)."""

    tokens: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]
    stop_reason: str  # "stop" or "length"
    topk: TopK | None = None
    routed_experts: RoutedExperts | None = None


class TokensDrawn(Message, frozen=True, kw_only=True):
    """Tokens of one continuation while it is drawn; the result, when it is stored, is the truth.

    After a restart of the row the same tokens are told again, from the first one on.
    """

    request_id: str
    index: int  # of the continuation
    start: int  # tokens of it before these
    tokens: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]
    topk: TopK | None = None


class SampleDone(Message, frozen=True, kw_only=True):
    """The sequences, in order of their index, and what produced them."""

    request_id: str
    sequences: tuple[Sequence, ...] = ()
    prompt_logprobs: bytes | None = None  # float32 [n], NaN where not computed
    topk_prompt_logprobs: TopK | None = None
    target_prompt_logprobs: TargetScores | None = None
    prompt_alt_tokens: TopK | None = None  # from the position after the first on
    prompt_cache_hit_tokens: int = 0
    prompt_tokens: int = 0
    weight_version: str = ""
    root: str = ""  # of the weights, where the engine follows their lineage
    plane: str = ""  # e.g. "torch/cpu/float32"
    sampler: str = ""  # the process that drew them
    environment: dict[str, str] = {}  # what it computed with: what decides the last bits
    request_blake3: str = ""  # of the encoded Sample that this answers


class SampleFailed(Message, frozen=True, kw_only=True):
    """The request could not be served."""

    request_id: str
    failure: Failed


SampleResult = SampleDone | SampleFailed


class SamplePicked(Message, frozen=True, kw_only=True):
    """One continuation, for the trainer to score again; nobody keeps it."""

    request_id: str
    index: int  # of the continuation
    adapter: AdapterRef | None = None  # what drew it; None: the base model itself
    tokens: bytes  # int32 [n]: the prompt, and what was drawn after it
    logprobs: bytes  # float32 [m], raw: of the last m tokens, those that were drawn
    plane: str = ""
    sampler: str = ""  # the process that drew it


class SequenceDigests(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of one continuation, over the bytes in its ``Sequence``."""

    length: int  # tokens
    stop_reason: str
    tokens: str
    logprobs: str
    topk: str = ""  # of the encoded TopK; empty for none


class SampleDigests(msgspec.Struct, frozen=True, kw_only=True):
    """What is logged of an answered request whatever the policy: enough to prove a copy of it.

    Digests are blake3 in hex, keyed if the record is sealed.
    """

    prompt: str
    prompt_length: int  # tokens
    sequences: tuple[SequenceDigests, ...]
    prompt_logprobs: str = ""  # empty for none, as those that follow
    topk_prompt_logprobs: str = ""  # of the encoded TopK, as the last
    target_tokens: str = ""  # of the encoded TargetTokens
    target_prompt_logprobs: str = ""  # of the encoded TargetScores
    prompt_alt_tokens: str = ""


class SampleContent(Message, frozen=True, kw_only=True):
    """What was said and answered: with it a logged sample can be drawn again."""

    prompt: bytes  # int32 [n]
    stop_strings: tuple[str, ...] = ()
    target_tokens: TargetTokens | None = None
    sequences: tuple[Sequence, ...]
    prompt_logprobs: bytes | None = None
    topk_prompt_logprobs: TopK | None = None
    target_prompt_logprobs: TargetScores | None = None
    prompt_alt_tokens: TopK | None = None


class SampleRecord(Message, frozen=True, kw_only=True):
    """One answered sampling request in the log of samples; there is one for each at most."""

    run: str  # the model whose weights it drew from; the session, for the base model's own
    request: Sample  # as carried out, but without prompt, target tokens and stop strings
    digests: SampleDigests
    content: bytes | None = None  # the encoded SampleContent, under the policy "full"
    sealed: str = ""  # how ``content`` is sealed and digests are keyed; empty: not at all
    plane: str = ""
    sampler: str = ""
    environment: dict[str, str] = {}

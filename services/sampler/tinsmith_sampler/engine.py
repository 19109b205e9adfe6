"""What a sampling engine is: the protocol, and the values that go in and out of it.

Two engines fit behind it, the built-in one on torch and SGLang. Both get tokens and give tokens;
neither knows of queues, blobs or sessions. An adapter is named by its version, and a version
names the same bits for ever, so nothing is ever replaced in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tinsmith.messages.sampling import SamplingParams

StopReason = Literal["stop", "length"]
Experts: TypeAlias = "NDArray[np.uint8] | NDArray[np.uint16]"
"""[prompt + continuation - 1, layers, k]: where each token was sent, in the router's order; the
last one is sent nowhere. Layers without experts are left out."""

NO_EXPERTS = "return_routed_experts: this model has no experts to send tokens to; leave it out"
"""Told to who asks for ``Row.routed_experts`` in vain."""


def expert_width(count: int) -> int:
    """Bytes of each of ``Experts`` where layers have ``count`` of them at most."""
    return 1 if count <= 256 else 2


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Drawn:
    """Tokens of a row that goes on; ``start`` tokens of it came before them."""

    index: int  # of the row
    start: int
    tokens: NDArray[np.int32]  # [n]
    logprobs: NDArray[np.float32]  # [n]
    topk: TopTokens | None = None


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Row:
    """One continuation to draw. ``seed`` and ``max_tokens`` are those of this row.

    ``tell`` is called with what has been drawn, from any thread, and from the first token on
    again when the row was begun anew. An engine may leave it alone: the result is the truth.
    """

    request_id: str
    index: int
    prompt: NDArray[np.int32]  # [n], n >= 1
    adapter: str | None  # version of a loaded adapter; None: the base model
    params: SamplingParams
    seed: int  # in [0, 2**63 - 1)
    max_tokens: int
    topk: int = 0
    routed_experts: bool = False
    tell: Callable[[Drawn], None] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class TopTokens:
    """k tokens at each position, the likeliest first unless drawn; logprobs are raw."""

    token_ids: NDArray[np.int32]  # [n, k]
    logprobs: NDArray[np.float32]  # [n, k]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Generated:
    """A finished row. The terminator is the last of ``tokens`` when one ended it.

    ``logprobs`` are log_softmax of the logits at temperature 1, before top_k and top_p.
    """

    tokens: NDArray[np.int32]  # [n]
    logprobs: NDArray[np.float32]  # [n]
    stop_reason: StopReason
    topk: TopTokens | None = None
    experts: Experts | None = None  # where they were asked for
    cached_tokens: int = 0  # prompt tokens that needed no pass of their own


@dataclass(frozen=True, eq=False, slots=True)
class Targets:
    """Tokens to score, each in place of the one at a position of the prompt."""

    positions: NDArray[np.int64]  # [cells], rising, >= 1
    tokens: NDArray[np.int64]  # [cells]; -1: nothing to score


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Alternatives:
    """Draws in place of each token of a prompt after the first: ``k`` of them, with ``seeds``."""

    seeds: tuple[int, ...]  # [k], each in [0, 2**63 - 1)
    temperature: float


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Scoring:
    """A prompt to compute for what its logits tell.

    Its own tokens are scored, or the last ``last_n`` of them; ``last_n`` does not bound the rest.
    """

    request_id: str
    prompt: NDArray[np.int32]  # [n], n >= 1
    adapter: str | None
    topk: int = 0
    last_n: int | None = None  # 0 .. n - 1; None: all but the first
    targets: Targets | None = None
    alternatives: Alternatives | None = None


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Scored:
    """Log-probability of each prompt token given those before it; NaN where not computed.

    A ``topk`` row that was not computed holds the filler: token 0 at -99999.0.
    """

    logprobs: NDArray[np.float32]  # [n]
    topk: TopTokens | None = None
    targets: NDArray[np.float32] | None = None  # [cells], 0 where there was nothing to score
    alternatives: TopTokens | None = None  # [n - 1, k]
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """How busy an engine is; a score counts as one row."""

    running: int
    queued: int
    free_rows: int


class Engine(Protocol):
    """One replica of one base model. All methods belong to the event loop that called ``start``.

    Cancelling the task that awaits ``generate`` or ``score`` frees what it held.
    """

    @property
    def plane(self) -> str:
        """What computes the numbers, e.g. ``torch/cpu/float32``."""

    @property
    def root(self) -> str:
        """Of the weights, where they are those of a lineage; else empty."""

    @property
    def environment(self) -> dict[str, str]:
        """What decides the last bits: versions, device, threads, weights. Known after ``start``."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Known after ``start``."""

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its continuation together. Known after ``start``."""

    @property
    def route_bytes(self) -> int:
        """Of ``Experts`` for one token; 0: the model has none. Known after ``start``."""

    async def start(self) -> None:
        """Load the model; StartupError when it cannot be served."""

    async def generate(self, row: Row) -> Generated:
        """Draw one continuation.

        Raises ServerError when the engine fails or stops, Gone after ``abort``, UserError when
        the row cannot be served as asked.
        """

    async def score(self, scoring: Scoring) -> Scored:
        """Score a prompt; raises as ``generate`` does."""

    async def load_adapter(self, version: str, files: Mapping[str, bytes]) -> None:
        """Make an adapter usable, from its PEFT files; idempotent.

        Raises InvalidRequest when the files are not a LoRA adapter of this base model.
        """

    async def unload_adapter(self, version: str) -> None:
        """Forget an adapter; rows that run with it end as if it were still there."""

    def abort(self, request_id: str) -> None:
        """End all rows of a request soon; whoever awaits them gets Gone."""

    def load(self) -> EngineLoad:
        """How busy the engine is now."""

    async def wait_ended(self) -> None:
        """Return when the engine has been closed; raise ServerError when it has failed for good."""

    async def close(self) -> None:
        """Stop; whatever is pending fails with ServerError. Idempotent."""

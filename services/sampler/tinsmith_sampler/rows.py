"""How a Sample message becomes rows, and how what the engine made of them becomes a SampleDone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from tinsmith.messages.sampling import (
    RoutedExperts,
    SampleDone,
    Sequence,
    TargetScores,
    TopK,
)
from tinsmith_sampler.checks import max_tokens
from tinsmith_sampler.engine import Alternatives, Row, Scoring, Targets

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Ordered

    from numpy.typing import NDArray

    from tinsmith.messages.sampling import Sample, TargetTokens
    from tinsmith_sampler.checks import Limits
    from tinsmith_sampler.engine import Drawn, Experts, Generated, Scored, TopTokens

    Tell = Callable[[Drawn], None]

_SEEDS = 2**63 - 1

_FIRST_ALTERNATIVE = 2**32
"""Index of the seed of the first draw in place of prompt tokens; no row has one as high."""


def row_seed(seed: int, index: int) -> int:
    """The seed of continuation ``index`` of a request with this seed, in [0, 2**63 - 1).

    The first 8 bytes, little-endian, of blake3(seed as 8 bytes || index as 8 bytes), modulo
    2**63 - 1: neighbouring seeds and indices give unrelated rows. ``seed`` is any 64-bit integer.
    """
    data = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake3(data).digest(8), "little") % _SEEDS


def request_seed(sample: Sample) -> int:
    """The seed asked for, or else one that a redelivery of the same request repeats."""
    if sample.params.seed is not None:
        return sample.params.seed
    return int.from_bytes(blake3(sample.request_id.encode()).digest(8), "little")


def expand(
    sample: Sample, prompt: NDArray[np.int32], limits: Limits, tell: Tell | None = None
) -> tuple[Row, ...]:
    """One row for each of ``num_samples``; ``prompt`` and ``sample`` have passed ``check``."""
    seed = request_seed(sample)
    length = max_tokens(sample.params, len(prompt), limits)
    return tuple(
        Row(
            request_id=sample.request_id,
            index=index,
            prompt=prompt,
            adapter=version(sample),
            params=sample.params,
            seed=row_seed(seed, index),
            max_tokens=length,
            topk=sample.topk_sample_logprobs,
            routed_experts=sample.routed_experts,
            tell=tell,
        )
        for index in range(sample.num_samples)
    )


def scoring(sample: Sample, prompt: NDArray[np.int32]) -> Scoring | None:
    """What to score, or None when the request asks for nothing of its prompt."""
    has_own = sample.prompt_logprobs or sample.topk_prompt_logprobs
    if not (has_own or sample.target_tokens or sample.prompt_alt_tokens_k):
        return None
    return Scoring(
        request_id=sample.request_id,
        prompt=prompt,
        adapter=version(sample),
        topk=sample.topk_prompt_logprobs,
        last_n=sample.prompt_logprobs_last_n if has_own else 0,
        targets=None if sample.target_tokens is None else targets(sample.target_tokens),
        alternatives=_alternatives(sample),
    )


def targets(asked: TargetTokens) -> Targets:
    """``asked`` with the position of each cell."""
    tokens = np.frombuffer(asked.tokens, "<i4").astype(np.int64)
    if asked.cells.bounds:
        counts = np.diff(np.frombuffer(asked.cells.bounds, "<i8"))
        rows = np.repeat(np.arange(len(counts)), counts)
    else:
        rows = np.arange(len(tokens)) // asked.cells.width
    return Targets(rows + 1, tokens)


def _alternatives(sample: Sample) -> Alternatives | None:
    if not (k := sample.prompt_alt_tokens_k):
        return None
    seed = request_seed(sample)
    return Alternatives(
        seeds=tuple(row_seed(seed, _FIRST_ALTERNATIVE + draw) for draw in range(k)),
        temperature=sample.params.temperature,
    )


def version(sample: Sample) -> str | None:
    """The adapter version that a request names; None: the base model."""
    return None if sample.adapter is None else sample.adapter.version


def assemble(
    sample: Sample,
    generated: Ordered[Generated],
    scored: Scored | None,
    plane: str,
    root: str = "",
) -> SampleDone:
    """The reply; ``generated`` is in order of the rows' index."""
    return SampleDone(
        request_id=sample.request_id,
        sequences=tuple(_sequence(row) for row in generated),
        prompt_logprobs=_prompt_logprobs(sample, scored),
        topk_prompt_logprobs=None if scored is None else topk_of(scored.topk),
        target_prompt_logprobs=_target_scores(sample.target_tokens, scored),
        prompt_alt_tokens=None if scored is None else topk_of(scored.alternatives),
        # The first of a request's tasks computes the prompt, the others find it there.
        prompt_cache_hit_tokens=min(
            one.cached_tokens for one in (*generated, scored) if one is not None
        ),
        prompt_tokens=len(sample.prompt) // 4,
        weight_version=version(sample) or "",
        root=root,
        plane=plane,
    )


def _prompt_logprobs(sample: Sample, scored: Scored | None) -> bytes | None:
    if scored is None or not sample.prompt_logprobs:
        return None
    return scored.logprobs.astype("<f4", copy=False).tobytes()


def _target_scores(asked: TargetTokens | None, scored: Scored | None) -> TargetScores | None:
    if asked is None or scored is None or scored.targets is None:
        return None
    return TargetScores(
        logprobs=scored.targets.astype("<f4", copy=False).tobytes(), cells=asked.cells
    )


def _sequence(row: Generated) -> Sequence:
    return Sequence(
        tokens=row.tokens.astype("<i4", copy=False).tobytes(),
        logprobs=row.logprobs.astype("<f4", copy=False).tobytes(),
        stop_reason=row.stop_reason,
        topk=topk_of(row.topk),
        routed_experts=_experts_of(row.experts),
    )


def _experts_of(experts: Experts | None) -> RoutedExperts | None:
    if experts is None:
        return None
    length, layers, k = experts.shape
    width = experts.itemsize
    data = experts.astype(f"<u{width}", copy=False).tobytes()
    return RoutedExperts(experts=data, width=width, length=length, layers=layers, k=k)


def topk_of(top: TopTokens | None) -> TopK | None:
    """The engine's top tokens as they travel."""
    if top is None:
        return None
    length, k = top.token_ids.shape
    return TopK(
        token_ids=top.token_ids.astype("<i4", copy=False).tobytes(),
        logprobs=top.logprobs.astype("<f4", copy=False).tobytes(),
        k=k,
        length=length,
    )

"""Requests with everything filled in but what a test is about."""

from __future__ import annotations

import numpy as np

from tinsmith.messages.sampling import Sample, SamplingParams
from tinsmith_sampler.checks import Limits
from tinsmith_sampler.engine import Row, Scoring

LIMITS = Limits(vocab_size=448, context_length=100, max_samples=8, max_topk=16)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


SHORT = tokens(5, 6, 7)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Random ordinary tokens: none of the special ones."""
    return np.random.default_rng(seed).integers(3, 448, length).astype(np.int32)


def sample(*, prompt: bytes | np.ndarray = SHORT, params: dict | None = None, **fields) -> Sample:
    return Sample(
        **{
            "request_id": "r1",
            "sampler_id": "s1",
            "seq": 1,
            "base_model": "tiny",
            "prompt": prompt if isinstance(prompt, bytes) else prompt.tobytes(),
            "params": SamplingParams(**(params or {})),
            **fields,
        }
    )


def row(
    *,
    prompt: np.ndarray = SHORT,
    adapter: str | None = None,
    seed: int = 0,
    max_tokens: int = 8,
    topk: int = 0,
    request_id: str = "r1",
    **params,
) -> Row:
    """Draws ``max_tokens`` tokens, EOS or not, unless ``ignore_eos=False`` is given."""
    return Row(
        request_id=request_id,
        index=0,
        prompt=prompt,
        adapter=adapter,
        params=SamplingParams(**{"ignore_eos": True, **params}),
        seed=seed,
        max_tokens=max_tokens,
        topk=topk,
    )


def scoring(prompt: np.ndarray, **fields) -> Scoring:
    return Scoring(**{"request_id": "r1", "prompt": prompt, "adapter": None, **fields})

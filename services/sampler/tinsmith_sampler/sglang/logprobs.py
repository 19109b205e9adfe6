"""Log-probabilities as an SGLang server writes them, as arrays. It has no word but null for NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinsmith_sampler.engine import TopTokens
from tinsmith_sampler.sglang.failures import SglangGone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tinsmith_sampler.sglang.wire import LogprobItem


class NotFinite(Exception):
    """The logits hold NaN or infinity."""


def chosen(items: Sequence[LogprobItem] | None, count: int) -> NDArray[np.float32]:
    """Of the first ``count`` tokens, float32 [count]; NotFinite, SglangGone."""
    return _finite([item[0] for item in _first(items, count)])


def top(items: Sequence[Sequence[LogprobItem] | None] | None, count: int, k: int) -> TopTokens:
    """The likeliest ``k`` at each of the first ``count`` positions; raises as ``chosen``."""
    rows = [_first(row, k) for row in _first(items, count)]
    ids = np.array([[item[1] for item in row] for row in rows], dtype=np.int32)
    logprobs = _finite([item[0] for row in rows for item in row])
    return TopTokens(ids.reshape(count, k), logprobs.reshape(count, k))


def _first(items: Sequence | None, count: int) -> Sequence:  # type: ignore[type-arg]
    if items is None or len(items) < count:
        has = 0 if items is None else len(items)
        raise SglangGone(f"an answer with {has} log-probabilities where {count} were asked for")
    return items[:count]


def _finite(values: Sequence[float | None]) -> NDArray[np.float32]:
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
    if not np.isfinite(array).all():
        raise NotFinite
    return array

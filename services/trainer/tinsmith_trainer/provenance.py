"""Where a datum's positions come from: its spans, checked and turned into a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tinsmith.messages.ops import Datum, Span


def sampled_targets(datum: Datum, where: str, *, tokens: int) -> NDArray[np.bool_] | None:
    """Which of the ``tokens`` targets were sampled, bool [n]; None for a datum without spans.

    Raises:
        InvalidRequest: the spans of either field do not tile it.
    """
    if not datum.input_spans and not datum.target_spans:
        return None
    _check_tiling(datum.input_spans, f"{where}.model_input_spans", tokens)
    _check_tiling(datum.target_spans, f"{where}.loss_fn_input_spans", tokens)
    is_sampled = [span.kind == "sampled" for span in datum.target_spans]
    return np.repeat(is_sampled, [span.length for span in datum.target_spans])


def inferred_targets(
    logprobs: NDArray[np.float32], advantages: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """What counts as sampled in a datum without spans: where either input [n] is not zero."""
    chosen: NDArray[np.bool_] = (logprobs != 0) | (advantages != 0)
    return chosen


def check_advantages(
    sampled: NDArray[np.bool_], advantages: NDArray[np.float32], where: str
) -> None:
    """InvalidRequest if a target outside of the sampled ones has an advantage; both [n]."""
    stray = np.flatnonzero((advantages != 0) & ~sampled)
    if len(stray):
        raise InvalidRequest(
            f"{where}.loss_fn_inputs['advantages'][{stray[0]}]: {advantages[stray[0]]:g} on a "
            "token that was not sampled, by loss_fn_input_spans; use 0 there"
        )


def _check_tiling(spans: Sequence[Span], at: str, tokens: int) -> None:
    for index, span in enumerate(spans):
        for field, value in (("offset", span.offset), ("length", span.length)):
            if value < 0:
                raise InvalidRequest(f"{at}[{index}].{field}: {value} is below 0")
        if not span.sequence_id:
            raise InvalidRequest(f"{at}[{index}].sequence_id: empty; name the sampled sequence")
    covered = sum(span.length for span in spans)
    if covered != tokens:
        raise InvalidRequest(
            f"{at}: the spans cover {covered} positions, but there are {tokens}; "
            "their lengths must add up to it"
        )

"""Where a sample that was drawn again differs from what was logged, and by how much. Pure.

Without a tolerance every bit counts. With one, log-probabilities may differ by it, and nothing
else: a token is the same or it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tinsmith.messages.sampling import SampleContent, Sequence, TargetScores, TopK


@dataclass(frozen=True)
class Difference:
    """The first place where two answers differ."""

    field: str  # such as sequences[0].tokens[3] or prompt_logprobs[7]
    expected: str
    found: str


class Comparison:
    """Of one answer with the one that it should equal."""

    def __init__(self, tolerance: float | None) -> None:
        self._tolerance = tolerance
        self.largest = 0.0
        """The largest gap between two log-probabilities; only kept with a tolerance."""

    def first(self, expected: SampleContent, found: SampleContent) -> Difference | None:
        """The first difference in what was answered; None when there is none."""
        return next(self._all(expected, found), None)

    def _all(self, expected: SampleContent, found: SampleContent) -> Iterator[Difference]:
        yield from self._scores("prompt_logprobs", expected.prompt_logprobs, found.prompt_logprobs)
        yield from self._topk(
            "topk_prompt_logprobs", expected.topk_prompt_logprobs, found.topk_prompt_logprobs
        )
        yield from self._targets(expected.target_prompt_logprobs, found.target_prompt_logprobs)
        yield from self._topk(
            "prompt_alt_tokens", expected.prompt_alt_tokens, found.prompt_alt_tokens
        )
        yield from _unequal("sequences", len(expected.sequences), len(found.sequences))
        pairs = zip(expected.sequences, found.sequences, strict=True)
        for index, (left, right) in enumerate(pairs):
            yield from self._sequence(f"sequences[{index}]", left, right)

    def _sequence(self, name: str, expected: Sequence, found: Sequence) -> Iterator[Difference]:
        yield from _array(f"{name}.tokens", _ints(expected.tokens), _ints(found.tokens))
        yield from self._scores(f"{name}.logprobs", expected.logprobs, found.logprobs)
        yield from _unequal(f"{name}.stop_reason", expected.stop_reason, found.stop_reason)
        yield from self._topk(f"{name}.topk", expected.topk, found.topk)

    def _targets(
        self, expected: TargetScores | None, found: TargetScores | None
    ) -> Iterator[Difference]:
        name = "target_prompt_logprobs"
        scores = (None if one is None else one.logprobs for one in (expected, found))
        yield from self._scores(name, *scores)

    def _topk(self, name: str, expected: TopK | None, found: TopK | None) -> Iterator[Difference]:
        if expected is None or found is None:
            yield from _unequal(name, _shape(expected), _shape(found))
            return
        yield from _unequal(name, _shape(expected), _shape(found))
        ids = _ints(expected.token_ids), _ints(found.token_ids)
        yield from _array(f"{name}.token_ids", *ids)
        yield from self._scores(f"{name}.logprobs", expected.logprobs, found.logprobs)

    def _scores(
        self, name: str, expected: bytes | None, found: bytes | None
    ) -> Iterator[Difference]:
        if expected is None or found is None:
            yield from _unequal(name, expected is not None, found is not None)
        elif self._tolerance is None or len(expected) != len(found):
            yield from _array(name, _floats(expected), _floats(found), bits=np.uint32)
        else:
            left, right = _floats(expected), _floats(found)
            # NaN stands where nothing was computed, on both sides or not at all.
            same = left.view(np.uint32) == right.view(np.uint32)
            gaps = np.where(same, 0.0, np.abs(left.astype(np.float64) - right))
            if gaps.size:
                self.largest = max(self.largest, float(np.nan_to_num(gaps, nan=np.inf).max()))
            yield from _at(name, left, right, ~(gaps <= self._tolerance))


def _array(
    name: str,
    expected: NDArray[Any],
    found: NDArray[Any],
    *,
    bits: type[np.generic] = np.int32,
) -> Iterator[Difference]:
    """The first item that differs, or is only on one side."""
    both = min(len(expected), len(found))
    differ = expected[:both].view(bits) != found[:both].view(bits)
    yield from _at(name, expected, found, differ)
    yield from _unequal(f"{name}: length", len(expected), len(found))


def _at(
    name: str, expected: NDArray[Any], found: NDArray[Any], differ: NDArray[np.bool_]
) -> Iterator[Difference]:
    if differ.any():
        at = int(np.argmax(differ))
        yield Difference(f"{name}[{at}]", f"{expected[at]:.9g}", f"{found[at]:.9g}")


def _unequal(name: str, expected: object, found: object) -> Iterator[Difference]:
    if expected != found:
        yield Difference(name, str(expected), str(found))


def _shape(topk: TopK | None) -> str:
    return "none" if topk is None else f"{topk.length} x {topk.k}"


def _ints(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data[: len(data) // 4 * 4], "<i4")


def _floats(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data[: len(data) // 4 * 4], "<f4")

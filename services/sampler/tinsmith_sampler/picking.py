"""Which continuations the trainer is asked to score again, and asking it.

A function of their ids decides, so that a request that is answered again picks the same ones. They
are told once the request is done with, and may be lost: nobody waits for them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from blake3 import blake3

from tinsmith import ids, whole
from tinsmith.messages.sampling import SampleDone, SamplePicked
from tinsmith.messages.table import SAMPLE_PICKED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.bus import Bus
    from tinsmith.messages.sampling import Sample, SampleResult, Sequence

PER_MINUTE = 30
"""Continuations of one sampler: what a large share may cost a trainer."""
MAX_TOKENS = 65_536
"""Of prompt and continuation: 512 KiB at most in a message, half of what the broker takes."""


def is_picked(request_id: str, index: int, share: float) -> bool:
    """Whether this continuation is in a ``share`` of all, from 0 to 1."""
    digest = blake3(f"{request_id}/{index}".encode()).digest(length=8)
    return int.from_bytes(digest, "big") < share * 2**64


class Allowance:
    """``per_minute`` in a minute, and none saved up."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._minute = -1
        self._left = 0

    def take(self) -> bool:
        """Whether there is one left, which is then used."""
        if (minute := int(self._clock() // 60)) != self._minute:
            self._minute, self._left = minute, self._per_minute
        self._left -= 1
        return self._left >= 0


class Picker:
    """Picks of what one sampler has drawn."""

    def __init__(self, bus: Bus, base_model: str, share: float) -> None:
        self._bus = bus
        self._base_model = base_model
        self._share = share
        self._allowance = Allowance(PER_MINUTE)

    async def pick(self, request: Sample, request_blake3: str, result: SampleResult) -> None:
        """Tell of what is picked, unless ``result`` answers another request of the same id."""
        if not isinstance(result, SampleDone) or result.request_blake3 != request_blake3:
            return
        for index, one in enumerate(result.sequences):
            if self._is_wanted(request, index, one):
                await self._tell(request, index, one, result)

    def _is_wanted(self, request: Sample, index: int, drawn: Sequence) -> bool:
        size = (len(request.prompt) + len(drawn.tokens)) // 4
        return (
            is_picked(request.request_id, index, self._share)
            and bool(drawn.tokens)
            and size <= MAX_TOKENS
            and self._allowance.take()
        )

    async def _tell(self, request: Sample, index: int, drawn: Sequence, done: SampleDone) -> None:
        picked = SamplePicked(
            request_id=request.request_id,
            index=index,
            adapter=request.adapter,
            tokens=request.prompt + drawn.tokens,
            logprobs=drawn.logprobs,
            plane=done.plane,
            sampler=done.sampler,
        )
        is_whole = request.adapter is not None and whole.holds_whole(request.adapter.files)
        model = whole.name_of(self._base_model) if is_whole else self._base_model
        await self._bus.emit(SAMPLE_PICKED, picked, pool=ids.pool_token(model))

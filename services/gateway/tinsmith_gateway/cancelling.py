"""Ending a sample that is not done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.messages.base import Failed
from tinsmith.messages.sampling import SampleFailed
from tinsmith.messages.services import SampleCancelled, SampleReady
from tinsmith.messages.table import HELD, SAMPLE_CANCELLED, SAMPLE_READY, SAMPLES
from tinsmith_gateway.whereabouts import held_tokens, is_sample_queued, sample_tokens

if TYPE_CHECKING:
    from tinsmith.bus import Bus

_CANCELLED = Failed(category="user", message="cancelled by its client")


async def cancel_sample(
    bus: Bus, base_model: str, sampler_id: str, seq: int, *, owner: str, why: Failed = _CANCELLED
) -> None:
    """One that is done, or was never asked for, stays as it is; ``base_model`` is resolved."""
    tokens = sample_tokens(base_model, sampler_id, seq)
    if await is_sample_queued(bus, owner, tokens):
        request_id = ids.future_id(sampler_id, seq)
        # First: whoever takes the request up again finds it answered.
        await bus.results.put_first(
            sampler_id, seq, SampleFailed(request_id=request_id, failure=why)
        )
        # In this order: what is being let go is not missed.
        await bus.withdraw(HELD, **held_tokens(owner, tokens))
        await bus.withdraw(SAMPLES, **tokens)
        await bus.emit(SAMPLE_CANCELLED, SampleCancelled(request_id=request_id))
        await bus.emit(SAMPLE_READY, SampleReady(request_id=request_id))

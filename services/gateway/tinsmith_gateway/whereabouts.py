"""Where the result of a ``request_id`` appears, and who is to make it.

A ``request_id`` names its model or sampling session and its place in the sequence, so every
gateway can answer for it: the log holds the results of training, the result store those of
sampling, and the queues what has none yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tinsmith import ids
from tinsmith.errors import Forgotten
from tinsmith.messages import ops
from tinsmith.messages.failures import to_failed
from tinsmith.messages.table import HELD, OPS, SAMPLES
from tinsmith_gateway.wire import custom_losses, results, unloading
from tinsmith_gateway.wire.heads import head_metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinsmith.bus import Bus
    from tinsmith.sealing import Seals
    from tinsmith_gateway.liveness import Role
    from tinsmith_gateway.models import Models
    from tinsmith_gateway.registry import Registry
    from tinsmith_gateway.wire.results import Payload

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One piece of work that was asked for, perhaps."""

    request_id: str
    session_id: str
    role: Role
    base_model: str
    stored: Callable[[], Awaitable[Payload | None]]
    is_queued: Callable[[], Awaitable[bool]]


class Whereabouts:
    """Finds work by its request id."""

    def __init__(self, bus: Bus, registry: Registry, models: Models, seals: Seals) -> None:
        self._bus = bus
        self._seals = seals
        self._registry = registry
        self._models = models

    async def of(self, owner: str, request_id: str) -> Work:
        """InvalidRequest for what is no request id; NotFound unless its target is ``owner``'s."""
        if (named := custom_losses.session_and_loss(request_id)) is not None:
            session_id, loss_id = named
            await self._registry.session(owner, session_id)
            return _done(request_id, session_id, custom_losses.created(loss_id))
        if (model_id := unloading.model_of(request_id)) is not None:
            run = await self._registry.run(owner, model_id)
            return _done(request_id, run.session_id, unloading.unloaded(model_id))
        future = ids.parse_future_id(request_id)
        if future.kind == "train":
            return await self._training(owner, request_id, future)
        return await self._sampling(owner, request_id, future)

    async def _training(self, owner: str, request_id: str, future: ids.FutureId) -> Work:
        run = await self._registry.run(owner, future.target)
        tokens = op_tokens(future.target, future.seq)
        return Work(
            request_id=request_id,
            session_id=run.session_id,
            role="trainer",
            base_model=self._models.resolve(run.base_model),
            stored=lambda: self._op_result(future),
            is_queued=lambda: self._bus.is_queued(OPS, **tokens),
        )

    async def _sampling(self, owner: str, request_id: str, future: ids.FutureId) -> Work:
        sampler = await self._registry.sampler(owner, future.target)
        base_model = self._models.resolve_sampled(sampler.base_model)
        tokens = sample_tokens(base_model, future.target, future.seq)
        return Work(
            request_id=request_id,
            session_id=sampler.session_id,
            role="sampler",
            base_model=base_model,
            stored=lambda: self._sample_result(future),
            is_queued=lambda: is_sample_queued(self._bus, owner, tokens),
        )

    async def _op_result(self, future: ids.FutureId) -> Payload | None:
        seal = await self._seals.of(future.target)
        if isinstance(seal.why_closed, Forgotten):
            return results.failed(to_failed(seal.why_closed))
        found = await self._bus.log.committed(future.target, future.seq)
        if found is None:
            return None
        result = await self._bus.log.result(found.record, seal)
        checkpoint = None
        if isinstance(result, ops.CreateModelDone):
            body = (await self._bus.log.op(found.record, seal)).body
            checkpoint = body.checkpoint if isinstance(body, ops.CreateModel) else None
        elif isinstance(result, ops.ForwardBackwardDone):
            _report_odd_metrics(result)
        return results.op_payload(
            result,
            model_id=future.target,
            head=head_metrics(future.seq, found.blake3),
            checkpoint=checkpoint,
        )

    async def _sample_result(self, future: ids.FutureId) -> Payload | None:
        result = await self._bus.results.get(future.target, future.seq)
        return None if result is None else results.sample_payload(result)


def _done(request_id: str, session_id: str, payload: Payload) -> Work:
    """Work that was over when it was asked for: its id tells the result."""

    async def stored() -> Payload:
        return payload

    async def is_queued() -> bool:
        return False

    return Work(
        request_id=request_id,
        session_id=session_id,
        role="trainer",
        base_model="",
        stored=stored,
        is_queued=is_queued,
    )


def op_tokens(model_id: str, seq: int) -> dict[str, str]:
    """What fills the subject of a training op."""
    return {"model": ids.token(model_id), "seq": str(seq)}


def sample_tokens(base_model: str, sampler_id: str, seq: int) -> dict[str, str]:
    """What fills the subject of a sampling request, in whatever share; the model is resolved."""
    return {
        "pool": ids.pool_token(base_model),
        "share": "*",
        "sampler": ids.token(sampler_id),
        "seq": str(seq),
    }


def held_tokens(owner: str, tokens: dict[str, str]) -> dict[str, str]:
    """What fills the subject of one that is held; ``tokens`` are those of ``sample_tokens``."""
    return {"owner": owner, **tokens}


async def is_sample_queued(bus: Bus, owner: str, tokens: dict[str, str]) -> bool:
    """Whether a sampling request waits, is held, or is being worked on."""
    if await bus.is_queued(SAMPLES, **tokens):
        return True
    if await bus.is_queued(HELD, **held_tokens(owner, tokens)):
        return True
    return await bus.is_queued(SAMPLES, **tokens)  # it may have been let go between the two looks


def _report_odd_metrics(result: ops.ForwardBackwardDone) -> None:
    odd = sorted(name for name in result.metrics if not results.is_metric_name(name))
    if odd:
        log.error("metrics left out: clients need names of the form name:reduction", names=odd)

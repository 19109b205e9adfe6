"""The canary: some of what samplers have drawn is scored again here, when there is nothing to do.

A trainer takes what was drawn from models in its hands, and from the base model. Each continuation
costs one or two forward passes, each made when no model waits for a turn. They read models and
change nothing of them, and what goes wrong is counted and told, but is nobody's error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from tinsmith import ids, whole
from tinsmith.errors import BlobMissing
from tinsmith.messages.table import SAMPLE_PICKED
from tinsmith.metrics import names as metrics
from tinsmith_trainer.agreement import PARTS, Limits, Rescored, Window
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.rescoring import Continuation, Rescorer

if TYPE_CHECKING:
    from tinsmith.messages.sampling import AdapterRef, SamplePicked
    from tinsmith.service import ServiceContext
    from tinsmith_trainer.agreement import Part
    from tinsmith_trainer.compute import Compute
    from tinsmith_trainer.engine import TrainingEngine

WAITING = 8
"""Continuations that may wait; more than these are not scored."""

_NO_LIMIT = float("inf")


class Models(Protocol):
    """What is known of the models in the trainer's hands."""

    def has(self, model_id: str) -> bool:
        """Whether it can be trained here now."""

    def is_as_saved(self, model_id: str, op_seq: int | None) -> bool:
        """Whether it has not changed since that op saved it."""


class Canary:
    """Hears of continuations, scores them, and tells figures of all together."""

    def __init__(
        self, context: ServiceContext, engine: TrainingEngine, compute: Compute, models: Models
    ) -> None:
        config = context.config.section(TrainerConfig)
        self._bus, self._blobs = context.bus, context.blobs
        self._load, self._log = context.load, context.log
        self._info = engine.info
        self._most_tokens = engine.microbatch_tokens
        self._compute = compute
        self._models = models
        self._rescorer = Rescorer(engine)
        self._waiting: asyncio.Queue[SamplePicked] = asyncio.Queue(WAITING)
        self._is_failing = False
        self._windows: dict[Part, Window] = {
            "numerics": Window(Limits(config.canary_kl, config.canary_dlogp)),
            "staleness": Window(Limits(config.canary_stale_kl, _NO_LIMIT)),
        }
        for part in PARTS:
            metrics.CANARY_OVER.labels(part).set(0)

    async def run(self) -> None:
        """Work until cancelled."""
        pool = ids.pool_token(self._info.name)
        heard = await self._bus.listen(SAMPLE_PICKED, self.hear, pool=pool)
        try:
            while True:
                picked = await self._waiting.get()
                metrics.CANARY_PICKED.labels(await self._outcome(picked)).inc()
        finally:
            await heard.close()

    def hear(self, picked: SamplePicked) -> None:
        """Take it in if it was drawn from what is here."""
        if picked.adapter is not None and not self._models.has(picked.adapter.model_id):
            return
        try:
            self._waiting.put_nowait(picked)
        except asyncio.QueueFull:
            metrics.CANARY_PICKED.labels("busy").inc()

    async def _outcome(self, picked: SamplePicked) -> str:
        try:
            outcome = await self._take(picked)
        except BlobMissing:  # its checkpoint was deleted
            return "outdated"
        except Exception as exc:  # noqa: BLE001 - nobody waits for it, and training goes on
            if not self._is_failing:
                self._log.warning("canary fails", request_id=picked.request_id, error=repr(exc))
            self._is_failing = True
            return "failed"
        self._is_failing = False
        return outcome

    async def _take(self, picked: SamplePicked) -> str:
        most = min(self._most_tokens, self._info.context_length)
        continuation = Continuation(picked, vocab_size=self._info.vocab_size, most_tokens=most)
        if not len(continuation.logprobs):
            return "long"
        rescored = await self._rescored(picked.adapter, continuation)
        if rescored is None:
            return "outdated"
        for part in PARTS:
            self._add(part, rescored, picked)
        metrics.CANARY_TOKENS.inc(len(rescored.sampler))
        return "scored"

    async def _rescored(
        self, adapter: AdapterRef | None, continuation: Continuation
    ) -> Rescored | None:
        """None when there are not the weights for it any more."""
        if adapter is not None and whole.holds_whole(adapter.files):
            return await self._of_whole(adapter, continuation)
        rescorer, run = self._rescorer, self._compute.run_idle
        version, model_id = ("", "") if adapter is None else (adapter.version, adapter.model_id)
        if not rescorer.has(version):
            found = {} if adapter is None else adapter.files
            files = {name: await self._blobs.get(ref) for name, ref in found.items()}
            await asyncio.to_thread(rescorer.load, version, files)
        same = await run(lambda: rescorer.same(continuation))
        if adapter is None or await run(lambda: rescorer.is_present(model_id)):
            return Rescored(continuation.logprobs, same, same)
        present = await run(lambda: rescorer.present(model_id, continuation))
        return None if present is None else Rescored(continuation.logprobs, same, present)

    async def _of_whole(self, adapter: AdapterRef, continuation: Continuation) -> Rescored | None:
        """Its earlier weights would take as much memory again: only present ones are scored."""
        model_id = adapter.model_id
        same = await self._compute.run_idle(lambda: self._rescorer.present(model_id, continuation))
        # Asked when it is done: then it was so all the time.
        if same is None or not self._models.is_as_saved(model_id, adapter.op_seq):
            return None
        return Rescored(continuation.logprobs, same, same)

    def _add(self, part: Part, rescored: Rescored, picked: SamplePicked) -> None:
        window = self._windows[part]
        has_turned = window.add(rescored.drift(part))
        tokens, k1, k3, dlogp = window.figures
        metrics.CANARY_KL.labels(part, "k1").set(k1)
        metrics.CANARY_KL.labels(part, "k3").set(k3)
        metrics.CANARY_DLOGP.labels(part).set(dlogp)
        metrics.CANARY_OVER.labels(part).set(window.is_over)
        self._load |= {f"canary_{part}_kl": k3, f"canary_{part}_dlogp": dlogp}
        if not has_turned:
            return
        told = {"tokens": tokens, "kl_k1": k1, "kl_k3": k3, "dlogp": dlogp}
        if window.is_over:
            about = {"request_id": picked.request_id, "sampler": picked.sampler}
            version = "" if picked.adapter is None else picked.adapter.version
            about |= {"weight_version": version, "plane": picked.plane}
            self._log.warning(f"{part} over its threshold", **about, **told)
        else:
            self._log.info(f"{part} within its threshold again", **told)

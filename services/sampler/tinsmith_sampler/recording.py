"""What the log of samples keeps of an answered request, and keeping it.

A record is written once the answer can be read and before the request is acknowledged. So it
costs a client no time, and a sampler that is killed in between leaves it to the next one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import structlog

from tinsmith import ids
from tinsmith.bus.samples import SampleAddress
from tinsmith.errors import BrokerUnavailable
from tinsmith.messages.base import encode
from tinsmith.messages.sampling import (
    SampleContent,
    SampleDigests,
    SampleDone,
    SampleRecord,
    SequenceDigests,
)
from tinsmith.metrics import names as metrics
from tinsmith_sampler.rows import request_seed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinsmith.bus import SampleLog
    from tinsmith.messages.sampling import Sample, SampleResult, Sequence
    from tinsmith.sealing import Seal
    from tinsmith_sampler.config import LogPolicy

    SealOf = Callable[[str], Awaitable[Seal]]

UNLOGGED = "samples_unlogged"
"""Figure in the liveness pings: answers that the log did not take, since the start."""

_log = structlog.get_logger(__name__)


class Recorder:
    """Writes the records of one sampler."""

    def __init__(
        self, samples: SampleLog, seal_of: SealOf, policy: LogPolicy, load: dict[str, float]
    ) -> None:
        """``load`` is where the figures of the liveness pings are."""
        self._samples = samples
        self._seal_of = seal_of
        self._policy = policy
        self._load = load
        self._is_failing = False

    async def write(self, request: Sample, request_blake3: str, result: SampleResult) -> None:
        """Log ``result``, which is stored, unless it answers another request of the same id.

        When the log does not take it, for want of room or whatever else, that is told, but no
        error: the client has its answer.

        Raises:
            BrokerUnavailable: the broker is away; the request will come again.
        """
        if self._policy == "off" or not isinstance(result, SampleDone):
            return
        if result.request_blake3 != request_blake3:
            return
        try:
            await self._append(request, result)
        except BrokerUnavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - or it would come again and again
            metrics.UNLOGGED.inc()
            self._load[UNLOGGED] = self._load.get(UNLOGGED, 0) + 1
            if not self._is_failing:
                _log.warning("samples not logged", request_id=request.request_id, error=str(exc))
            self._is_failing = True
        else:
            if self._is_failing:
                _log.info("samples logged again", unlogged=self._load[UNLOGGED])
            self._is_failing = False

    async def _append(self, request: Sample, done: SampleDone) -> None:
        address = SampleAddress(run_of(request), request.sampler_id, request.seq)
        seal, has_content = await self._seal_of(address.run), self._policy == "full"
        # On a thread, as an answer can have megabytes and the event loop serves other requests.
        data = await asyncio.to_thread(
            lambda: encode(record(request, done, seal, has_content=has_content))
        )
        await self._samples.append(address, data)


def run_of(request: Sample) -> str:
    """The model whose weights it draws from; its session, for the base model's own."""
    trained_by = "" if request.adapter is None else request.adapter.model_id
    return trained_by or ids.session_of(request.sampler_id)


def record(request: Sample, done: SampleDone, seal: Seal, *, has_content: bool) -> SampleRecord:
    """The record of a request that was answered by ``done``."""
    content = SampleContent(
        prompt=request.prompt,
        stop_strings=request.params.stop_strings,
        target_tokens=request.target_tokens,
        sequences=tuple(map(_without_experts, done.sequences)),
        prompt_logprobs=done.prompt_logprobs,
        topk_prompt_logprobs=done.topk_prompt_logprobs,
        target_prompt_logprobs=done.target_prompt_logprobs,
        prompt_alt_tokens=done.prompt_alt_tokens,
    )
    seed = request_seed(request)
    params = msgspec.structs.replace(request.params, seed=seed, stop_strings=())
    return SampleRecord(
        run=run_of(request),
        request=msgspec.structs.replace(request, prompt=b"", params=params, target_tokens=None),
        digests=digests(content, seal),
        content=seal.seal(encode(content)) if has_content else None,
        sealed=seal.scheme,
        plane=done.plane,
        sampler=done.sampler,
        environment=done.environment,
    )


def _without_experts(sequence: Sequence) -> Sequence:
    """Where tokens were sent follows from all the rest, and is larger than it."""
    return msgspec.structs.replace(sequence, routed_experts=None)


def digests(content: SampleContent, seal: Seal) -> SampleDigests:
    """What is logged of ``content`` even where it is not kept itself."""

    def of_struct(struct: msgspec.Struct | None) -> str:
        return "" if struct is None else seal.digest(encode(struct))

    def of_sequence(sequence: Sequence) -> SequenceDigests:
        return SequenceDigests(
            length=len(sequence.tokens) // 4,
            stop_reason=sequence.stop_reason,
            tokens=seal.digest(sequence.tokens),
            logprobs=seal.digest(sequence.logprobs),
            topk=of_struct(sequence.topk),
        )

    scores = content.prompt_logprobs
    return SampleDigests(
        prompt=seal.digest(content.prompt),
        prompt_length=len(content.prompt) // 4,
        sequences=tuple(map(of_sequence, content.sequences)),
        prompt_logprobs="" if scores is None else seal.digest(scores),
        topk_prompt_logprobs=of_struct(content.topk_prompt_logprobs),
        target_tokens=of_struct(content.target_tokens),
        target_prompt_logprobs=of_struct(content.target_prompt_logprobs),
        prompt_alt_tokens=of_struct(content.prompt_alt_tokens),
    )

"""What each logged sample says, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith.logbook.text import plain, short

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tinsmith.logbook.samples import Samples, StoredSample

HEADER = (
    f"{'request':<44} {'kept':<6} {'weights':<12} {'prompt':<15} {'drawn':<12} {'seed':<20} how"
)

Facts = dict[str, Any]
"""Of one sample, ready for JSON."""


async def facts(samples: Samples, run: str) -> AsyncIterator[Facts]:
    """Every sample of ``run``, without what was said and answered.

    Raises:
        LogDamaged: one cannot be read.
    """
    async for stored in samples.stored(run):
        yield _facts(stored)


def line(told: Mapping[str, Any]) -> str:
    """``told`` under ``HEADER``; digests are shortened."""
    sequences, digests = told["digests"]["sequences"], told["digests"]
    tokens = sum(sequence["length"] for sequence in sequences)
    adapter = told["adapter"]
    weights = "base" if adapter is None else short(adapter["version"])
    if adapter is not None and adapter["op_seq"] is not None:
        weights += f"@{adapter['op_seq']}"
    prompt = f"{digests['prompt_length']}:{short(digests['prompt'])}"
    drawn = f"{len(sequences)} of {tokens}"
    start = f"{plain(told['request_id']):<44} {told['kept']:<6} {weights:<12} {prompt:<15} "
    return f"{start}{drawn:<12} {told['params']['seed']:<20} {_how(told)}"


def _how(told: Mapping[str, Any]) -> str:
    params = told["params"]
    said = [f"temperature {params['temperature']:g}"]
    if params["max_tokens"] is not None:
        said.append(f"max_tokens {params['max_tokens']}")
    if params["top_k"] != -1:
        said.append(f"top_k {params['top_k']}")
    if params["top_p"] != 1:
        said.append(f"top_p {params['top_p']:g}")
    if told["digests"]["prompt_logprobs"]:
        said.append("prompt scored")
    return ", ".join([*said, plain(told["sampler"])])


def _facts(stored: StoredSample) -> Facts:
    record, request = stored.record, stored.record.request
    return {
        "request_id": request.request_id,
        "kept": "digest" if record.content is None else "full",
        "base_model": request.base_model,
        "adapter": msgspec.to_builtins(request.adapter),
        "num_samples": request.num_samples,
        "params": msgspec.to_builtins(request.params),
        "digests": msgspec.to_builtins(record.digests),
        "sealed": record.sealed,
        "plane": record.plane,
        "sampler": record.sampler,
        "environment": record.environment,
    }

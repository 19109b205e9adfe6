"""What of the facts an operator should see to, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.overview.facts import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.overview.facts import Overview

FULL = 0.9
"""Of a limit: beyond it, it is time to act."""
SKEW_MS = 1000.0
"""Clocks that are further apart make lags and ages misleading."""
ALONE = ("gateway", "checkpointer")
PER_MODEL = ("trainer", "sampler")


def problems(overview: Overview) -> Iterator[Problem]:
    """The gravest first."""
    yield from _nobody(overview)
    yield from _in_trouble(overview)
    yield from _fenced(overview)
    yield from _full(overview)
    yield from _versions(overview)
    broker = overview.broker
    if broker is not None and abs(broker.skew_ms) > SKEW_MS:
        yield Problem(
            what=f"the broker's clock is {broker.skew_ms / 1e3:+.1f} s from this machine's",
            remedy="let a time service (chrony, systemd-timesyncd) set both",
        )
    for sentence in overview.unknown:
        yield Problem(
            what=sentence, remedy="look as a user of the broker who may ask (docs/security.md)"
        )


def _nobody(overview: Overview) -> Iterator[Problem]:
    roles = {service.service for service in overview.services}
    for role in (*ALONE, *PER_MODEL):
        if role not in roles:
            yield Problem(
                what=f"no {role} is heard",
                remedy=f"start one with 'tinsmith {role}', or everything with 'tinsmith up'",
            )
    for role, models in _needed(overview).items():
        if role not in roles:
            continue  # told already
        for model, why in sorted(models.items()):
            if not any(
                service.service == role and model in service.base_models
                for service in overview.services
            ):
                yield Problem(
                    what=f"no {role} of {model} is heard, and {why}",
                    remedy=f"start one with 'tinsmith {role} --model {model}'",
                )


def _needed(overview: Overview) -> dict[str, dict[str, str]]:
    """Role -> base model -> why somebody of that role is needed for it."""
    trained = {
        run.base_model: "its runs wait" for run in overview.runs if run.is_live and run.queued
    }
    sampled = {
        share.base_model: f"{share.messages} samples wait"
        for queue in overview.queues
        if queue.name == "samples"
        for share in queue.shares
    }
    return {"trainer": trained, "sampler": sampled}


def _in_trouble(overview: Overview) -> Iterator[Problem]:
    for service in overview.services:
        if service.trouble:
            yield Problem(
                what=f"{service.instance}: {service.trouble}",
                remedy=f"see the log of {service.instance}, and docs/running.md",
            )


def _fenced(overview: Overview) -> Iterator[Problem]:
    for lineage in overview.lineages:
        for replica in lineage.replicas:
            if replica.state == "fenced":
                yield Problem(
                    what=f"{replica.replica} does not serve {lineage.lineage_id}: {replica.reason}",
                    remedy="its bits are not those that were published: look at the machine's "
                    "memory and disk, then restart the sampler",
                )


def _full(overview: Overview) -> Iterator[Problem]:
    broker = overview.broker
    if broker is None:
        return
    if _is_full(broker.storage, broker.max_storage):
        yield Problem(
            what=f"the broker's storage is {broker.storage / broker.max_storage:.0%} full",
            remedy="raise max_file in its configuration, or free space ('tinsmith gc')",
        )
    for stream in broker.streams:
        # Those that let their oldest go are full for most of their lives.
        if stream.kind == "work queue" and _is_full(stream.size, stream.max_bytes):
            yield Problem(
                what=f"{stream.name} is {stream.size / stream.max_bytes:.0%} full; requests will "
                "be answered with 429",
                remedy="start more of the services that empty it",
            )


def _is_full(used: int, limit: int) -> bool:
    return limit > 0 and used >= FULL * limit


def _versions(overview: Overview) -> Iterator[Problem]:
    versions = sorted({service.version for service in overview.services})
    if len(versions) > 1:
        yield Problem(
            what=f"services of several versions are heard: {', '.join(versions)}",
            remedy="update and restart the older ones; during an update this passes by itself",
        )

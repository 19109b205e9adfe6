"""The JetStream streams: their settings, and creating them once for everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from nats.js.api import (
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StoreCompression,
    StreamConfig,
)
from nats.js.errors import APIError, BadRequestError, NotFoundError

from tinsmith.errors import StartupError
from tinsmith.messages import table

if TYPE_CHECKING:
    from nats.js import JetStreamContext

    from tinsmith.config import BusConfig

log = structlog.get_logger(__name__)

GIB = 1 << 30
DAY_S = 86400.0
DEDUP_WINDOW_S = 120.0
RESULT_AGE_S = 6 * 3600.0
SAMPLE_AGE_S = 3600.0
AUDIT_AGE_S = 400 * DAY_S
_DENIED_FOR_GOOD = "can not cancel deny purge"


def _work_queue(name: str, row: table.Row, *, max_age_s: float = 0) -> StreamConfig:
    """One message per subject at most: a second publish of one op is refused, not doubled."""
    return StreamConfig(
        name=name,
        subjects=[row.wildcard],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        discard_new_per_subject=True,
        max_bytes=8 * GIB,
        max_age=max_age_s,
        duplicate_window=DEDUP_WINDOW_S,
        allow_direct=True,
    )


def _append_only(
    name: str, row: table.Row, *, max_bytes: int = -1, max_age_s: float = 0
) -> StreamConfig:
    """No message can be deleted from it; when there is a limit, the oldest makes room.

    Logs can be purged, by who may; not those of anchors, which show it if it was not said.
    """
    return StreamConfig(
        name=name,
        subjects=[row.wildcard],
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW if max_bytes < 0 else DiscardPolicy.OLD,
        max_bytes=max_bytes,
        max_age=max_age_s,
        deny_delete=True,
        deny_purge=name == table.ANCHOR_STREAM,
        compression=StoreCompression.S2,
        allow_direct=True,
    )


def configs(settings: BusConfig) -> list[StreamConfig]:
    """All streams, with the copies and limits in ``settings``."""
    wanted = [
        _work_queue(table.OPS.stream, table.OPS),
        _work_queue(table.PLACEMENTS.stream, table.PLACEMENTS),
        _work_queue(table.SAMPLES.stream, table.SAMPLES, max_age_s=SAMPLE_AGE_S),
        _work_queue(table.HELD.stream, table.HELD, max_age_s=DAY_S),
        # Full, these two stop training rather than forget.
        _append_only(table.LOG_STREAM, table.LOG_TEMPLATE),
        _append_only(table.ANCHOR_STREAM, table.ANCHOR_TEMPLATE),
        # Sampling goes on, whatever was sampled long ago.
        _append_only(
            table.SAMPLE_LOG_STREAM,
            table.SAMPLE_LOG_TEMPLATE,
            max_bytes=settings.sample_log_bytes,
            max_age_s=settings.sample_log_days * DAY_S,
        ),
        # Full, this one stops publishing, and neither training nor sampling.
        _append_only(table.LINEAGE_STREAM, table.LINEAGE_TEMPLATE),
        StreamConfig(
            name=table.CHUNK_STREAM,
            subjects=[table.CHUNK_TEMPLATE.wildcard],
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_msgs_per_subject=1,  # the same bytes again are the same chunk, and newer
            allow_direct=True,
        ),
        StreamConfig(
            name=table.RESULT_STREAM,
            subjects=[table.RESULT_TEMPLATE.wildcard],
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_msgs_per_subject=1,  # with the next line: the first result wins
            discard_new_per_subject=True,
            max_age=RESULT_AGE_S,
            max_bytes=8 * GIB,
            allow_direct=True,
        ),
        StreamConfig(
            name=table.AUDIT_STREAM,
            subjects=[table.AUDIT_TEMPLATE.wildcard],
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,  # what owners do must not fail because they did much
            max_age=AUDIT_AGE_S,
            max_bytes=GIB,
            allow_direct=True,
        ),
        StreamConfig(
            name=table.REGISTRY_STREAM,
            subjects=[f"{table.PREFIX}.reg.>"],
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_msgs_per_subject=1,
            allow_direct=True,
        ),
    ]
    return [config.evolve(num_replicas=settings.replicas) for config in wanted]


async def ensure(js: JetStreamContext, settings: BusConfig) -> None:
    """Create what is missing and update what differs; several services may do so at once.

    With ``create_streams`` off, nothing is changed: they must be there.

    Raises:
        StartupError: a stream exists with settings that cannot be changed in place, or not at all.
    """
    for config in configs(settings):
        if not settings.create_streams:
            await _expect(js, config)
            continue
        try:
            await js.add_stream(config)
        except BadRequestError:
            await _update(js, config)


async def _expect(js: JetStreamContext, config: StreamConfig) -> None:
    try:
        found = await js.find_stream_name_by_subject((config.subjects or [""])[0])
    except NotFoundError:
        found = ""
    if found != config.name:
        raise StartupError(
            f"bus.create_streams is false, and the broker has no stream {config.name}; run "
            "'tinsmith prepare' once, as a user who may create streams"
        )


async def _update(js: JetStreamContext, config: StreamConfig) -> None:
    try:
        await js.update_stream(config)
    except NotFoundError:
        await js.add_stream(config)
    except APIError as exc:
        if _DENIED_FOR_GOOD in (exc.description or "") and not config.deny_purge:
            # An earlier version, or its operator, had it keep everything: no log of it is pruned.
            await _update(js, config.evolve(deny_purge=True))
            return
        msg = (
            f"stream {config.name} on the broker has settings that cannot be changed in place "
            f"({exc.description}); it was made by another version of Tinsmith"
        )
        raise StartupError(msg) from exc

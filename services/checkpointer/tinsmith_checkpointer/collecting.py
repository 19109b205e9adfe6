"""``tinsmith gc``: what the blob store and the broker keep, why, and what is freed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog

from tinsmith.errors import InvalidRequest
from tinsmith.logbook.installation import connect
from tinsmith.logbook.text import size
from tinsmith.messages import table
from tinsmith.sealing import Seals
from tinsmith_checkpointer.collection import FREED, Collection, Fate, Plan
from tinsmith_checkpointer.config import CheckpointerConfig
from tinsmith_checkpointer.logs_report import LogClass, classes, held
from tinsmith_checkpointer.pruning import Pruner
from tinsmith_checkpointer.references import References
from tinsmith_checkpointer.retention import RetentionConfig
from tinsmith_checkpointer.sweep import Sweep

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import Bus
    from tinsmith.bus.claimed import Held
    from tinsmith.config import Config

WHY: dict[Fate, str] = {
    "checkpoints": "parts of checkpoints that exist",
    "samplers": "weights of sampling sessions that exist",
    "states": "snapshots in logs: a new trainer starts from them, a replay compares with them",
    "loaded": "what operations in logs have loaded: a replay reads it again",
    "payloads": "requests and results in logs, too large for the broker",
    "samples": "the log of samples: its records, and weights of those logged in full",
    "in flight": "requests that wait, and results that can still be fetched",
    "discarded": "lost their last reference less than grace_s ago: somebody may be reading them",
    "fresh": "put less than grace_s ago: who put them may be about to refer to them",
    "ended": "parts of what was deleted, replaced or has expired",
    "orphans": "nothing refers to them: saves that failed or died, what has left queues and logs",
}


class Class(msgspec.Struct):
    """Blobs with one fate."""

    name: str
    fate: Literal["kept", "freed"]
    blobs: int
    bytes: int
    why: str


class Stream(msgspec.Struct):
    """What the broker holds when all is done."""

    name: str
    messages: int
    bytes: int
    kept: str


class Report(msgspec.Struct):
    """What ``--json`` prints."""

    classes: list[Class]
    leftover_bytes: int
    """Of writes that were not finished; freed too."""
    freeable_bytes: int
    streams: list[Stream]
    logs: list[LogClass]
    dry_run: bool = True
    grace_s: float = 0.0
    freed_bytes: int = 0
    pruned_logs: int = 0


async def main(config: Config, *, is_dry: bool, is_json: bool) -> int:
    """Look, free unless ``is_dry``, and say so; the exit code.

    Raises:
        InvalidRequest: freeing is switched off.
        ServerError: something could not be read or deleted; what was freed before that is gone,
            and nothing else.
    """
    settings = config.section(CheckpointerConfig)
    if not is_dry and not settings.free_bytes:
        raise InvalidRequest(
            "checkpointer.free_bytes is false, so nothing may be freed; set it to true, or look "
            "with --dry-run"
        )
    log = structlog.get_logger("tinsmith.gc")
    async with connect(config, name="gc") as (bus, blobs):
        logs, pruned = await _logs(config, bus, log, is_dry=is_dry)
        plan, freed = await _blobs(config, bus, blobs, log, is_dry=is_dry)
        report = _report(plan, await bus.claims.streams(), logs)
    report.dry_run, report.grace_s = is_dry, settings.grace_s
    report.freed_bytes, report.pruned_logs = freed, pruned
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if is_json else text(report))
    return 0


async def _logs(
    config: Config, bus: Bus, log: BoundLogger, *, is_dry: bool
) -> tuple[list[LogClass], int]:
    """What was to become of logs; and how many were pruned, before blobs are looked at."""
    policy = config.section(RetentionConfig)
    pruner = Pruner(bus, policy, log, instance="gc")
    found = await held(bus)
    plan = await pruner.plan()
    told = classes(found, plan, has_policy=policy.prunes)
    plan.begun += [mark for model_id, mark in plan.removed.items() if model_id in found]
    return told, 0 if is_dry else await pruner.carry_out(plan)


async def _blobs(
    config: Config, bus: Bus, blobs: BlobStore, log: BoundLogger, *, is_dry: bool
) -> tuple[Plan, int]:
    """What was to become of blobs; and how many bytes were freed."""
    grace_s = config.section(CheckpointerConfig).grace_s
    references = References(bus, Seals(bus, config))
    collection = Collection(bus, blobs, references, grace_s=grace_s)
    plan = await collection.plan()
    if is_dry:
        return plan, 0
    freed = await collection.carry_out(plan)
    sweep = Sweep(bus, blobs, references, log, grace_s=grace_s)
    watch = await bus.table(table.DISCARDED).watch(sweep.note)
    await sweep.run()  # nothing is left of it but the notes
    await watch.close()
    return plan, freed


def _report(plan: Plan, streams: list[Held], logs: list[LogClass]) -> Report:
    of_blobs = [
        Class(
            name=fate,
            fate="freed" if fate in FREED else "kept",
            blobs=len(refs),
            bytes=sum(ref.size for ref in refs),
            why=why,
        )
        for fate, why in WHY.items()
        if (refs := plan.of(fate)) or fate in FREED
    ]
    return Report(
        classes=of_blobs,
        leftover_bytes=plan.leftover_bytes,
        freeable_bytes=sum(ref.size for ref in plan.of(*FREED)) + plan.leftover_bytes,
        streams=[
            Stream(name=name, messages=messages, bytes=count, kept=table.STREAMS[name])
            for name, messages, count in streams
            if messages
        ],
        logs=logs,
    )


def text(report: Report) -> str:
    """``report`` for people."""
    words = {"kept": "keep", "freed": "free", "pruned": "prune"}
    lines = ["blob store"]
    lines += [_row(words[c.fate], c.name, c.blobs, c.bytes, c.why) for c in report.classes]
    if report.leftover_bytes:
        lines.append(_row("free", "unfinished", "", report.leftover_bytes, "writes that died"))
    lines.append("logs")
    lines += [_row(words[c.fate], c.name, c.entries, c.bytes, _of_logs(c)) for c in report.logs]
    lines.append("broker")
    lines += [_row("keep", s.name, s.messages, s.bytes, s.kept) for s in report.streams]
    if report.dry_run:
        lines.append(f"would free {size(report.freeable_bytes)}; nothing was changed")
    else:
        lines.append(f"freed {size(report.freed_bytes)}, pruned {report.pruned_logs} logs")
    return "\n".join(lines) + "\n"


def _of_logs(told: LogClass) -> str:
    return f"{told.logs} {'log' if told.logs == 1 else 'logs'}: {told.why}"


def _row(*cells: Any) -> str:  # noqa: ANN401 - of numbers and texts
    verb, name, count, total, why = cells
    return f"  {verb:<5} {name:<13} {count:>8}  {size(total):>10}  {why}"

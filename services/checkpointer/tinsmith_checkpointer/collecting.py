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
from tinsmith_checkpointer.references import References
from tinsmith_checkpointer.sweep import Sweep

if TYPE_CHECKING:
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
    """What the broker holds; ``tinsmith gc`` takes nothing from it."""

    name: str
    messages: int
    bytes: int
    kept: str


class Report(msgspec.Struct):
    """What ``--json`` prints."""

    dry_run: bool
    grace_s: float
    classes: list[Class]
    leftover_bytes: int
    """Of writes that were not finished; freed too."""
    freeable_bytes: int
    freed_bytes: int
    streams: list[Stream]


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
    async with connect(config, name="gc") as (bus, blobs):
        references = References(bus, Seals(bus, config))
        grace_s = settings.grace_s
        collection = Collection(bus, blobs, references, grace_s=grace_s)
        plan = await collection.plan()
        freed = 0
        if not is_dry:
            log = structlog.get_logger("tinsmith.gc")
            freed = await collection.carry_out(plan)
            sweep = Sweep(bus, blobs, references, log, grace_s=grace_s)
            watch = await bus.table(table.DISCARDED).watch(sweep.note)
            await sweep.run()  # nothing is left of it but the notes
            await watch.close()
        held = await bus.claims.streams()
    report = _report(plan, held, grace_s=grace_s, is_dry=is_dry, freed=freed)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if is_json else text(report))
    return 0


def _report(plan: Plan, held: list[Held], *, grace_s: float, is_dry: bool, freed: int) -> Report:
    classes = [
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
        dry_run=is_dry,
        grace_s=grace_s,
        classes=classes,
        leftover_bytes=plan.leftover_bytes,
        freeable_bytes=sum(ref.size for ref in plan.of(*FREED)) + plan.leftover_bytes,
        freed_bytes=freed,
        streams=[
            Stream(name=name, messages=messages, bytes=count, kept=table.STREAMS[name])
            for name, messages, count in held
            if messages
        ],
    )


def text(report: Report) -> str:
    """``report`` for people."""
    words = {"kept": "keep", "freed": "free"}
    lines = ["blob store"]
    lines += [_row(words[c.fate], c.name, c.blobs, c.bytes, c.why) for c in report.classes]
    if report.leftover_bytes:
        lines.append(_row("free", "unfinished", "", report.leftover_bytes, "writes that died"))
    lines.append("broker")
    lines += [_row("keep", s.name, s.messages, s.bytes, s.kept) for s in report.streams]
    if report.dry_run:
        lines.append(f"would free {size(report.freeable_bytes)}; nothing was changed")
    else:
        lines.append(f"freed {size(report.freed_bytes)}")
    return "\n".join(lines) + "\n"


def _row(*cells: Any) -> str:  # noqa: ANN401 - of numbers and texts
    verb, name, count, total, why = cells
    return f"  {verb}  {name:<13} {count:>8}  {size(total):>10}  {why}"

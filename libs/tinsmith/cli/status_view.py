"""An installation at a glance: what ``tinsmith status`` shows of an overview."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from tinsmith.cli.tables import (
    BAD,
    FAINT,
    GOOD,
    WIDE,
    WIDER,
    Column,
    age,
    last_name,
    short_ids,
    since,
    styled,
    table,
    title,
)
from tinsmith.logbook.text import plain, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from tinsmith.overview.facts import Lineage, Overview, Queue, Run, Service

MOST_RUNS = 20
"""Shown; ``tinsmith runs`` shows all."""
_SERVICES = (
    Column("service"),
    Column("serves"),
    Column("does", WIDE),
    Column("state"),
    Column("version", WIDER),
    Column("metrics", WIDER),
)
_RUNS = (
    Column("run"),
    Column("model", WIDE),
    Column("trainer"),
    Column("op", is_number=True),
    Column("ago", is_number=True),
    Column("queued", WIDE, is_number=True),
    Column("waits for", WIDE),
)
_QUEUES = (
    Column("queue"),
    Column("of"),
    Column("messages", is_number=True),
    Column("size", WIDE, is_number=True),
    Column("oldest", is_number=True),
)
_LINEAGES = (Column("run"), Column("version", is_number=True), Column("replicas"))
_STREAMS = (
    Column("stream"),
    Column("messages", is_number=True),
    Column("size", is_number=True),
    Column("limit", is_number=True),
    Column("what it is", WIDE),
)


def render(overview: Overview, width: int) -> Group:
    """All of it, for a terminal of so many columns."""
    return Group(*_parts(overview, width))


def _parts(overview: Overview, width: int) -> Iterator[RenderableType]:
    yield from _problems(overview)
    yield title("Services")
    yield table(_SERVICES, map(_service, overview.services), width)
    live = [run for run in overview.runs if run.is_live]
    names = short_ids(run.model_id for run in overview.runs)
    yield title(f"Runs: {len(live)} live of {overview.run_count}")
    if live:
        yield table(_RUNS, (_run(run, names, overview.at_s) for run in live[:MOST_RUNS]), width)
    if len(live) > MOST_RUNS:
        yield Text(f"and {len(live) - MOST_RUNS} more: tinsmith runs", style=FAINT)
    yield title("Queues")
    yield table(_QUEUES, (row for queue in overview.queues for row in _queue(queue)), width)
    if overview.lineages:
        yield title("Weights")
        rows = (_lineage(one, names) for one in overview.lineages)
        yield table(_LINEAGES, rows, width)
    yield from _broker(overview, width)


def _problems(overview: Overview) -> Iterator[RenderableType]:
    if not overview.problems:
        yield styled("All is well.", GOOD)
    for problem in overview.problems:
        yield Text.assemble(("! ", BAD), (plain(problem.what, 1000), BAD))
        yield Text(f"  {plain(problem.remedy, 1000)}")


def _service(service: Service) -> Sequence[object]:
    serves = ", ".join(map(last_name, service.base_models)) or "-"
    state: object = styled("ready", GOOD)
    if service.trouble:
        state = styled("trouble", BAD)
    elif not service.is_taking:
        state = "draining"
    pool = f" ({service.pool})" if service.pool else ""
    metrics = service.metrics_url.removeprefix("http://") or None
    return service.instance, serves + pool, doing(service), state, service.version, metrics


def doing(service: Service) -> str | None:
    """The figures of its ping, in words; None when it tells none."""
    load, words = service.load, []
    if "models" in load:
        room = load.get("room", 0)
        words.append(f"{load['models']:.0f} of {load['models'] + room:.0f} models")
    if "busy" in load:
        words.append(f"{load['busy']:.0%} busy")
    if waiting := load.get("waiting"):
        words.append(f"{waiting:.0f} waiting")
    if "weights_version" in load:
        words.append(f"weights {load['weights_version']:.0f}")
    if fenced := load.get("weights_fenced"):
        words.append(f"{fenced:.0f} fenced")
    return ", ".join(words) or None


def _run(run: Run, names: dict[str, str], now_s: float) -> Sequence[object]:
    waits = None
    if run.waiting_turns is not None:
        waits = f"{run.waiting_turns} turns, {run.waiting_tokens} tokens"
    return (
        names[run.model_id],
        last_name(run.base_model),
        holder(run),
        run.last_op,
        since(run.last_op_s, now_s),
        run.queued,
        waits,
    )


def holder(run: Run) -> object:
    """The trainer that has the run; in red when its last one is not heard any more."""
    if not run.trainer:
        return None
    return run.trainer if run.is_held else styled(f"{run.trainer} (gone)", BAD)


def _queue(queue: Queue) -> Iterator[Sequence[object]]:
    oldest = age(queue.oldest_s) if queue.messages else None
    if len(queue.shares) != 1:
        yield queue.name, None, queue.messages, size(queue.size), oldest
    for share in queue.shares:
        pool = f" ({share.pool})" if share.pool else ""
        of = last_name(share.base_model) + pool
        if len(queue.shares) == 1:
            yield queue.name, of, share.messages, size(queue.size), oldest
        else:
            yield "", of, share.messages, None, None


def _lineage(lineage: Lineage, names: dict[str, str]) -> Sequence[object]:
    counted = Counter((one.state, one.version) for one in lineage.replicas)
    words = [f"{n} {state} at {version}" for (state, version), n in sorted(counted.items())]
    if behind := max((one.behind for one in lineage.replicas), default=0):
        words.append(f"up to {behind} behind")
    if lag_ms := max((one.lag_ms for one in lineage.replicas), default=0.0):
        words.append(f"lag {lag_ms:.0f} ms")
    run = names.get(lineage.lineage_id, lineage.lineage_id)
    return run, lineage.version, "; ".join(words) or "none heard"


def _broker(overview: Overview, width: int) -> Iterator[RenderableType]:
    broker = overview.broker
    if broker is None:
        return
    limit = f" of {size(broker.max_storage)}" if broker.max_storage else ""
    told = f"Broker: nats-server {broker.version}, {size(broker.storage)}{limit} stored"
    yield title(f"{told}, answers in {broker.rtt_ms:.1f} ms")
    rows = [
        (
            stream.name,
            stream.messages,
            size(stream.size),
            size(stream.max_bytes) if stream.max_bytes else None,
            stream.kind,
        )
        for stream in broker.streams
    ]
    if rows:
        yield table(_STREAMS, rows, width)

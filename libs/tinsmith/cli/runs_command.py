"""What the commands of ``tinsmith runs`` do."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from tinsmith.cli.looking import OK
from tinsmith.cli.progress import progress
from tinsmith.cli.status_view import holder
from tinsmith.cli.tables import (
    FAINT,
    GOOD,
    WIDE,
    Column,
    cell,
    console,
    last_name,
    say,
    short_ids,
    since,
    styled,
    table,
    title,
)
from tinsmith.logbook.installation import connect
from tinsmith.logbook.source import resolve_run
from tinsmith.logbook.text import plain, size
from tinsmith.overview import watching
from tinsmith.overview.gathering import LISTEN_S
from tinsmith.overview.known import is_live

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinsmith.config import Config
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.overview import Overview
    from tinsmith.overview.facts import Run

_RUNS = (
    Column("run"),
    Column("owner", WIDE),
    Column("model", WIDE),
    Column("rank", WIDE, is_number=True),
    Column("op", is_number=True),
    Column("ago", is_number=True),
    Column("state"),
    Column("saved", WIDE, is_number=True),
)
_CHECKPOINTS = (
    Column("checkpoint"),
    Column("kind", WIDE),
    Column("step", is_number=True),
    Column("size", is_number=True),
    Column("made (UTC)", WIDE),
    Column("until (UTC)", WIDE),
)


async def list_runs(loaded: Config, *, is_all: bool, is_json: bool) -> int:
    """One line each."""
    async with connect(loaded, name="runs") as (bus, _), watching(bus) as watch:
        registry = watch.known.registry
        count = sum(is_all or is_live(run, registry) for run in registry.runs.values())
        with progress("Reading logs", count) as advance:
            found = await watch.look(has_ended=is_all, on_log=advance)
    _warn(found)
    if is_json:
        _write(found.runs)
        return OK
    out, names = console(), short_ids(run.model_id for run in found.runs)
    rows = (_row(run, names, found.at_s) for run in found.runs)
    if found.runs:
        say(out, table(_RUNS, rows, out.width))
    if hidden := found.run_count - len(found.runs):
        say(out, Text(f"{hidden} that are over: tinsmith runs --all", style=FAINT))
    elif not found.runs:
        say(out, Text("There is no run yet.", style=FAINT))
    return OK


async def show_run(loaded: Config, text: str, *, is_json: bool) -> int:
    """Everything of one run.

    Raises:
        NotFound, InvalidRequest: no run, or several, begin with ``text``.
    """
    async with connect(loaded, name="runs-show") as (bus, _), watching(bus) as watch:
        registry = watch.known.registry
        all_runs = sorted(run.model_id for run in registry.runs.values())
        model_id = resolve_run(all_runs, text)
        registry.runs = {key: run for key, run in registry.runs.items() if run.model_id == model_id}
        await asyncio.sleep(LISTEN_S)  # for who has it
        found = await watch.look(has_ended=True)
        checkpoints = sorted(
            (one for one in registry.checkpoints.values() if one.model_id == model_id),
            key=lambda one: one.created_ns,
        )
    _warn(found)
    (run,) = found.runs
    if is_json:
        told = msgspec.to_builtins(run) | {"checkpoints": list(map(_fields, checkpoints))}
        _write(told)
        return OK
    out = console()
    for name, value in _lines(run, found):
        say(out, Text.assemble((f"{name:<12}  ", FAINT), cell(value)))
    if checkpoints:
        say(out, title("Checkpoints"), table(_CHECKPOINTS, map(_saved, checkpoints), out.width))
    return OK


def _row(run: Run, names: dict[str, str], now_s: float) -> Sequence[object]:
    return (
        names[run.model_id],
        _owner(run),
        last_name(run.base_model),
        "all" if run.is_whole else run.rank,
        run.last_op,
        since(run.last_op_s, now_s),
        _state(run),
        run.checkpoints or None,
    )


def _owner(run: Run) -> str:
    """The name of its key, or enough of its id."""
    return run.owner_name or run.owner[:8]


def _state(run: Run) -> Text:
    return styled("live", GOOD) if run.is_live else cell(run.ended)


def _lines(run: Run, found: Overview) -> Iterator[tuple[str, object]]:
    yield "run", run.model_id
    yield "state", _state(run)
    yield "owner", f"{run.owner_name} ({run.owner})" if run.owner_name else run.owner
    yield "project", run.project_id
    yield "base model", run.base_model
    yield "trains", "all weights" if run.is_whole else f"an adapter of rank {run.rank}"
    yield "optimizer", run.optimizer
    yield "made", f"{_minute(run.created_s)} UTC"
    yield "trainer", holder(run) if run.is_live else run.trainer or None
    last = f"{run.last_op}, {since(run.last_op_s, found.at_s)} ago"
    yield "last op", None if run.last_op is None else last
    yield "queued", f"{run.queued} ops"
    for lineage in found.lineages:
        if lineage.lineage_id == run.model_id:
            heard = ", ".join(f"{one.replica} at {one.version}" for one in lineage.replicas)
            yield "weights", f"version {lineage.version}; {heard or 'nobody follows them'}"


def _saved(checkpoint: Checkpoint) -> Sequence[object]:
    expires = checkpoint.expires_ns
    return (
        checkpoint.name,
        checkpoint.kind,
        checkpoint.step,
        size(checkpoint.size_bytes),
        _minute(checkpoint.created_ns / 1e9),
        None if expires is None else _minute(expires / 1e9),
    )


def _fields(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "path": checkpoint.path,
        "kind": checkpoint.kind,
        "step": checkpoint.step,
        "size": checkpoint.size_bytes,
        "created_s": checkpoint.created_ns / 1e9,
        "expires_s": None if checkpoint.expires_ns is None else checkpoint.expires_ns / 1e9,
        "public": checkpoint.public,
    }


def _minute(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")


def _warn(found: Overview) -> None:
    for sentence in found.unknown:
        sys.stderr.write(f"tinsmith runs: {plain(sentence, 1000)}\n")


def _write(told: object) -> None:
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")

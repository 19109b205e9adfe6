"""``tinsmith replay``: a run is done again from its log, and every outcome compared.

log -> outline -> plan -> workbench (base model, engine) -> replaying -> report
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from tinsmith.logbook.source import open_run
from tinsmith.logbook.text import plain
from tinsmith_trainer import replay_report, segments
from tinsmith_trainer.outline import read_outline
from tinsmith_trainer.segments import Sample, Stretch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tinsmith.cli.replay import Options
    from tinsmith.config import Config
    from tinsmith.logbook import Entry, Logbook
    from tinsmith_trainer.replay_report import Summary

EXIT_EQUAL = 0
EXIT_DIVERGED = 1


def main(options: Options, config: Config) -> int:
    """Replay as ``options`` say, and print what was found; 0 when all is equal, else 1.

    Raises:
        TinsmithError: it cannot be replayed.
    """
    summary = asyncio.run(_replay(options, config))
    render = replay_report.to_json if options.is_json else replay_report.to_text
    sys.stdout.write(render(summary) + "\n")
    return EXIT_EQUAL if summary.divergence is None else EXIT_DIVERGED


async def _replay(options: Options, config: Config) -> Summary:
    async with open_run(options.target, config) as (logbook, run):
        return await replay(run, logbook, options, config)


async def replay(run: str, logbook: Logbook, options: Options, config: Config) -> Summary:
    """Replay the log of ``run``, which is a whole model id; raises as ``main``."""
    outline = await read_outline(logbook, run)
    stretch = Stretch(options.first, options.last)
    plan = segments.plan(outline.states, outline.newest, stretch, _sample(options))
    # Here, as they import torch: what is wrong with the request is told before that.
    from tinsmith_trainer.replaying import Replay
    from tinsmith_trainer.workbench import departures, open_workbench

    async with open_workbench(outline.environments, config, logbook) as bench:
        doubts = departures(outline.environments, bench.environment)
        for doubt in doubts:
            sys.stderr.write(f"tinsmith replay: warning: {plain(doubt)}\n")
        with replay_report.progress(sum(map(len, plan.segments))) as on_op:
            replaying = Replay(
                run,
                logbook,
                bench,
                plan,
                saved={state.seq: state.state_blake3 for state in outline.states},
                tolerance=options.tolerance,
                on_op=on_op,
            )
            # Closed at once: it may have a reader at the broker.
            entries = cast("AsyncGenerator[Entry, None]", logbook.entries(run))
            async with aclosing(entries):
                findings = await replaying.run(entries)
    return replay_report.summarise(run, options, plan, findings, doubts)


def _sample(options: Options) -> Sample | None:
    if options.share is None:
        return None
    return Sample(options.share, secrets.randbits(32) if options.seed is None else options.seed)

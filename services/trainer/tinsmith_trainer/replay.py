"""``tinsmith replay``: a run is done again from its log, and every outcome compared.

log -> outline -> plan -> workbench (base model, engine) -> replaying -> report
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from typing import TYPE_CHECKING

from tinsmith.errors import InvalidRequest
from tinsmith.logbook.broker import BrokerLogbook
from tinsmith.logbook.replay_output import conclude, warn
from tinsmith.logbook.source import open_run
from tinsmith_trainer import replay_report, segments
from tinsmith_trainer.outline import read_outline
from tinsmith_trainer.segments import Sample, Stretch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from tinsmith.cli.replay import Options
    from tinsmith.config import Config
    from tinsmith.logbook import Entry, Logbook
    from tinsmith_trainer.outline import Outline
    from tinsmith_trainer.replay_report import Summary
    from tinsmith_trainer.segments import Plan

_STOPS = (signal.SIGINT, signal.SIGTERM)


def main(options: Options, config: Config) -> int:
    """Replay as ``options`` say, and print what was found; 0 when all is equal, else 1.

    Raises:
        TinsmithError: it cannot be replayed.
    """
    summary = asyncio.run(_replay(options, config))
    render = replay_report.to_json if options.is_json else replay_report.to_text
    return conclude(render(summary), is_equal=summary.divergence is None)


async def _replay(options: Options, config: Config) -> Summary:
    async with open_run(options.target, config) as (logbook, run):
        return await replay(run, logbook, options, config)


async def replay(run: str, logbook: Logbook, options: Options, config: Config) -> Summary:
    """Replay the log of ``run``, which is a whole model id; raises as ``main``."""
    outline = await read_outline(logbook, run)
    plan = _plan(outline, options)
    entries = _followed(logbook, run) if options.is_following else logbook.entries(run)
    # Here, as they import torch: what is wrong with the request is told before that.
    from tinsmith_trainer.replaying import Replay
    from tinsmith_trainer.workbench import departures, open_workbench

    async with open_workbench(outline.environments, config, logbook) as bench:
        doubts = departures(outline.environments, bench.environment)
        for doubt in doubts:
            warn(doubt)
        with replay_report.progress(None if options.is_following else plan.ops) as on_op:
            doing = Replay(
                run,
                logbook,
                bench,
                plan,
                tolerance=options.tolerance,
                is_alone=options.is_alone,
                on_op=on_op,
            )
            if options.is_following:
                await _until_stopped(doing.run(entries))
            else:
                await doing.run(entries)
    return replay_report.summarise(run, options, plan, doing.findings, doubts)


def _plan(outline: Outline, options: Options) -> Plan:
    stretch, sample = Stretch(options.first, options.last), None
    if options.is_following:
        if options.last is not None or options.share is not None:
            raise InvalidRequest(
                "--follow: it has no end and leaves nothing out; drop --to and --spot-check"
            )
        return segments.plan(outline.states, sys.maxsize, stretch)
    if options.share is not None:
        seed = secrets.randbits(32) if options.seed is None else options.seed
        sample = Sample(options.share, seed)
    return segments.plan(outline.states, outline.newest, stretch, sample)


def _followed(logbook: Logbook, run: str) -> AsyncIterator[Entry]:
    if not isinstance(logbook, BrokerLogbook):
        raise InvalidRequest("--follow: a file does not grow; give a run of a running installation")
    return logbook.follow(run)


async def _until_stopped(work: Coroutine[None, None, object]) -> None:
    """Ends with ``work``, or when SIGINT or SIGTERM asks for what was found until then."""
    task, loop = asyncio.create_task(work, name="replay"), asyncio.get_running_loop()
    for number in _STOPS:
        loop.add_signal_handler(number, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        for number in _STOPS:
            loop.remove_signal_handler(number)
    if not task.cancelled():
        task.result()

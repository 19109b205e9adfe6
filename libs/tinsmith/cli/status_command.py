"""What ``tinsmith status`` does."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec
from rich.live import Live

from tinsmith.cli.looking import FOUND, OK
from tinsmith.cli.status_view import render
from tinsmith.cli.tables import console
from tinsmith.logbook.installation import connect
from tinsmith.overview import watching
from tinsmith.overview.gathering import LISTEN_S

if TYPE_CHECKING:
    from tinsmith.config import Config
    from tinsmith.overview import Overview, Watch

EVERY_S = 2.0


async def status(loaded: Config, *, is_watching: bool, is_json: bool) -> int:
    """1 when there is something to see to."""
    async with connect(loaded, name="status") as (bus, _), watching(bus) as watch:
        await asyncio.sleep(LISTEN_S)
        found = await watch.look()
        if not is_watching:
            _show(found, is_json=is_json)
            return FOUND if found.problems else OK
        await _watch(watch, found, is_json=is_json)
    return OK


async def _watch(watch: Watch, found: Overview, *, is_json: bool) -> None:
    """Until Ctrl-C: in place on a terminal, else one after the other."""
    out = console()
    if is_json or not out.is_terminal:
        while True:
            _show(found, is_json=is_json)
            await asyncio.sleep(EVERY_S)
            found = await watch.look()
    with Live(render(found, out.width), console=out, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(found, out.width), refresh=True)
            await asyncio.sleep(EVERY_S)
            found = await watch.look()


def _show(found: Overview, *, is_json: bool) -> None:
    if is_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        sys.stdout.flush()
    else:
        out = console()
        out.print(render(found, out.width))

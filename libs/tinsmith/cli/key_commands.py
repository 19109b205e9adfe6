"""What the commands of ``tinsmith keys`` do."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from tinsmith import config, ids, keys, logs
from tinsmith.bus.views import View
from tinsmith.errors import InvalidRequest, NotFound, TinsmithError
from tinsmith.logbook.installation import connect
from tinsmith.logbook.text import plain
from tinsmith.messages.registry import ApiKey
from tinsmith.messages.services import AuditEntry
from tinsmith.messages.table import API_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from tinsmith.bus import Bus
    from tinsmith.config import Config

    Main = Callable[[Config], Coroutine[Any, Any, None]]

OK, FAILED = 0, 2
SHORT_DIGITS = 12  # of a digest: the id of a key in the list
_DAY_NS = 86_400 * 10**9
_ID = re.compile(rf"[0-9a-f]{{{keys.MIN_DIGITS},64}}")
_ROW = "{:<12}  {:<16}  {:<16}  {:<16}  {:<4}  {:<15}  {}"

_HEADS = ("id", "owner", "project", "made (UTC)", "last", "limits", "state")


class Terms(NamedTuple):
    """What a key is good for; None is the default of each."""

    project: str | None = None
    expires_days: float | None = None
    max_unfinished: int | None = None
    sampling_share: int | None = None


def run(name: str, path: Path | None, data_dir: Path | None, main: Main) -> int:
    """Run one command to its end; the exit code."""
    environ = dict(os.environ)
    if data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(data_dir.absolute())
    try:
        loaded = config.load(path, environ)
        logs.configure(loaded.logs, service="keys", instance="keys")
        asyncio.run(main(loaded))
    except TinsmithError as error:
        logs.report(f"keys {name}", error)
        return FAILED
    return OK


async def create(loaded: Config, owner: str, terms: Terms) -> None:
    """Standard output gets the key and nothing else."""
    name, project, days = keys.check_owner(owner), terms.project, terms.expires_days
    if project is not None and not ids.is_project(project):
        raise InvalidRequest(
            f"--project: {project[:80]!r} cannot name a project; use 1 to 128 letters, digits or "
            "'_.:@-', starting with a letter or digit"
        )
    key, now_ns = keys.new_key(), time.time_ns()
    entry = ApiKey(
        digest=keys.digest(key),
        owner=keys.owner_of_name(name),
        name=name,
        last_four=key[-4:],
        created_ns=now_ns,
        project_id=project,
        expires_ns=None if days is None else now_ns + int(days * _DAY_NS),
        max_unfinished=terms.max_unfinished,
        sampling_share=terms.sampling_share,
    )
    async with connect(loaded, name="keys-create") as (bus, _):
        await bus.table(API_KEYS).create(entry.digest, entry)
        await _note(bus, entry, "key_created")
    sys.stdout.write(f"{key}\n")
    sys.stderr.write(
        f"This is the only time the key is shown; 'tinsmith keys revoke {_short(entry)}' ends it.\n"
    )


async def show(loaded: Config) -> None:
    """One line per key, oldest first."""
    async with connect(loaded, name="keys-list") as (bus, _):
        found = await _all(bus)
    sys.stdout.write(_ROW.format(*_HEADS) + "\n")
    for entry in found:
        columns = (
            _short(entry),
            plain(entry.name),
            plain(entry.project_id or "-"),
            _minute(entry.created_ns),
            plain(entry.last_four),
            _limits(entry),
            _state(entry),
        )
        sys.stdout.write(_ROW.format(*columns) + "\n")


async def limit(loaded: Config, text: str, terms: Terms) -> None:
    """NotFound for a key that is not in the registry."""
    wanted = {"max_unfinished": terms.max_unfinished, "sampling_share": terms.sampling_share}
    async with connect(loaded, name="keys-limit") as (bus, _):
        entry = _named(await _all(bus), text)
        await bus.table(API_KEYS).update(
            entry.digest, lambda now: now and structs.replace(now, **wanted)
        )
        await _note(bus, entry, "key_limited", limits=_limits(structs.replace(entry, **wanted)))
    limits = _limits(structs.replace(entry, **wanted))
    sys.stdout.write(f"limits of {_short(entry)} of {plain(entry.name)}: {limits}\n")


async def revoke(loaded: Config, text: str) -> None:
    """NotFound for a key that is not in the registry; one that was revoked before stays so."""
    async with connect(loaded, name="keys-revoke") as (bus, _):
        entry = _named(await _all(bus), text)
        await bus.table(API_KEYS).update(entry.digest, keys.revoked)
        await _note(bus, entry, "key_revoked")
    sys.stdout.write(f"revoked: {_short(entry)} of {plain(entry.name)}, ...{entry.last_four}\n")


async def _note(bus: Bus, entry: ApiKey, event: str, **details: str) -> None:
    """In the trail of the key's owner, who can read what was done by an operator."""
    told = {"key_id": _short(entry), "by": "operator", **details}
    await bus.audit.add(
        AuditEntry(owner=entry.owner, topic="keys", event=event, at_ns=time.time_ns(), details=told)
    )


def _named(entries: list[ApiKey], text: str) -> ApiKey:
    digits = keys.digest(text) if text.startswith(keys.PREFIX) else text
    if _ID.fullmatch(digits) is None:
        raise InvalidRequest(
            f"key: {text[:80]!r} is neither a key nor {keys.MIN_DIGITS} or more digits of an id; "
            "'tinsmith keys list' shows the ids"
        )
    found = [entry for entry in entries if entry.digest.startswith(digits)]
    if len(found) > 1:
        raise InvalidRequest(f"key: {digits} names {len(found)} keys; give more of the id")
    if not found:
        raise NotFound(
            "key: there is no such key in the registry; 'tinsmith keys list' shows them, and those "
            "of the configuration are removed there (gateway.api_keys, gateway.api_key_file)"
        )
    return found[0]


async def _all(bus: Bus) -> list[ApiKey]:
    view = View(bus.table(API_KEYS), lambda entry: entry.owner)
    watch = await view.watch()
    await watch.close()
    return sorted(view, key=lambda entry: entry.created_ns)


def _short(entry: ApiKey) -> str:
    return entry.digest[:SHORT_DIGITS]


def _limits(entry: ApiKey) -> str:
    """Of what is unfinished, and of what is drawn at a time; a dash is the configuration's."""
    return f"{entry.max_unfinished or '-'} / {entry.sampling_share or '-'}"


def _state(entry: ApiKey) -> str:
    if entry.revoked_ns is not None:
        return f"revoked {_minute(entry.revoked_ns)}"
    if entry.expires_ns is None:
        return "valid"
    word = "expired" if entry.expires_ns <= time.time_ns() else "valid until"
    return f"{word} {_minute(entry.expires_ns)}"


def _minute(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")

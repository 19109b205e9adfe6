"""Whose a checkpoint is that comes in by the command line: the owner behind an API key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith import keys
from tinsmith.errors import InvalidRequest
from tinsmith.messages.table import API_KEYS
from tinsmith.paths import DataDir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.bus import Bus
    from tinsmith.config import Config


async def owner_of(bus: Bus, config: Config, environ: Mapping[str, str]) -> str:
    """The owner id of the key in TINKER_API_KEY, or that ``tinsmith up`` made here.

    Raises:
        InvalidRequest: there is neither, or the key was revoked.
    """
    key = environ.get("TINKER_API_KEY") or _key_of_up(config)
    if not key:
        raise InvalidRequest(
            "TINKER_API_KEY: not set; set it to the key that the checkpoint shall belong to"
        )
    entry = await bus.table(API_KEYS).get(keys.digest(key))
    if entry is None:
        return keys.owner_of_key(key)  # one of the gateway's configuration
    if entry.revoked_ns is not None:
        raise InvalidRequest("TINKER_API_KEY: the key was revoked; use another")
    return entry.owner


def _key_of_up(config: Config) -> str:
    try:
        told = json.loads(DataDir(config.data_dir).up_file.read_text())
        return Path(told["api_key_file"]).read_text().strip()
    except (OSError, KeyError, TypeError, ValueError):
        return ""

"""What ``tinsmith import`` does."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith import ids, whole
from tinsmith.cli import service_commands
from tinsmith.closed_sessions import closed_session
from tinsmith.errors import InvalidRequest, NotFound
from tinsmith.logbook.installation import connect
from tinsmith.messages.checkpoints import CommitCheckpoint, GetCheckpoint
from tinsmith.messages.registry import Run
from tinsmith.messages.table import COMMIT_CHECKPOINT, GET_CHECKPOINT, RUNS, SESSIONS
from tinsmith.portable.adapter_folder import check_base, config_of, read_adapter
from tinsmith.portable.owner import owner_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tinsmith.bus import Bus
    from tinsmith.config import Config
    from tinsmith.messages.checkpoints import CheckpointKind
    from tinsmith.messages.ops import LoraShape

KINDS: tuple[CheckpointKind, ...] = ("weights", "sampler_weights")
COMMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    folder: Path
    base: str
    name: str
    is_any_base: bool = False


def import_adapter(options: Options, config: Config) -> str:
    """Make the adapter two checkpoints of a run of its own; their paths, in words.

    Raises:
        TinsmithError: it cannot be used here, or no checkpointer is running; nothing was written
            then.
    """
    ids.check_name(options.name)
    if whole.is_whole(options.base):
        raise InvalidRequest("--base: an adapter needs the model itself, not all of its weights")
    model = config.model(options.base)
    files = read_adapter(options.folder)
    if not options.is_any_base:
        check_base(config_of(files), (model.name, model.source))
    read = service_commands.load("read-adapter", extra="trainer")
    made, lora = read(files, model)
    paths = asyncio.run(_store(options, config, made, lora, model.tokenizer))
    return f"imported an adapter of rank {lora.rank}: {' and '.join(paths)}"


async def _store(
    options: Options,
    config: Config,
    files: Mapping[str, bytes],
    lora: LoraShape,
    tokenizer_id: str,
) -> list[str]:
    async with connect(config, name="import") as (bus, blobs):
        owner = await owner_of(bus, config, os.environ)
        session_id = ids.new_session_id()
        await _check_answers(bus, session_id, options.name)
        parts = {name: await blobs.put(data) for name, data in files.items()}
        run = await _register(bus, owner, session_id, options, lora)
        paths = []
        for kind in KINDS:
            request = CommitCheckpoint(
                model_id=run.model_id,
                kind=kind,
                name=options.name,
                op_seq=0,
                base_model=options.base,
                lora=lora,
                step=0,
                parts=parts,
                tokenizer_id=tokenizer_id,
            )
            done = await bus.call(COMMIT_CHECKPOINT, request, timeout_s=COMMIT_S)
            paths.append(done.path)
    return paths


async def _check_answers(bus: Bus, session_id: str, name: str) -> None:
    """NoResponder when no checkpointer is running, before anything is written."""
    path = ids.CheckpointPath(ids.model_id(session_id, 0), KINDS[0], name)
    with contextlib.suppress(NotFound):
        await bus.call(GET_CHECKPOINT, GetCheckpoint(path=str(path)))


async def _register(
    bus: Bus, owner: str, session_id: str, options: Options, lora: LoraShape
) -> Run:
    """A run that was never trained, in a session that is over, as copies have them."""
    session = closed_session(session_id, owner, "an import")
    run = Run(
        model_id=ids.model_id(session_id, 0),
        session_id=session_id,
        owner=owner,
        created_ns=session.created_ns,
        base_model=options.base,
        lora=lora,
        user_metadata={"imported_from": options.folder.name[:200]},
    )
    await bus.table(SESSIONS).create(ids.token(session_id), session)
    return await bus.table(RUNS).create(ids.token(run.model_id), run)

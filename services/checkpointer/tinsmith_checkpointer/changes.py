"""What becomes of a checkpoint after it was committed: published, kept, copied, deleted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import structs

from tinsmith import ids
from tinsmith.errors import NotFound
from tinsmith.messages import table
from tinsmith_checkpointer.discarding import Discards
from tinsmith_checkpointer.expiry import check_alive, expires_at

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.messages.checkpoints import (
        ChangeCheckpoint,
        Checkpoint,
        CopyCheckpoint,
        DeleteCheckpoint,
    )


class Changes:
    """Answers the gateways, who have checked that the caller may."""

    def __init__(self, bus: Bus) -> None:
        self._checkpoints = bus.table(table.CHECKPOINTS)
        self._runs = bus.table(table.RUNS)
        self._discards = Discards(bus)

    async def change(self, request: ChangeCheckpoint) -> Checkpoint:
        """Publish, hide, or set when it expires. Raises NotFound or Gone."""
        now_ns = time.time_ns()

        def changed(present: Checkpoint | None) -> Checkpoint:
            alive = _alive(present, request.path, now_ns)
            if request.public is not None:
                alive = structs.replace(alive, public=request.public)
            if request.sets_ttl:
                alive = structs.replace(alive, expires_ns=expires_at(now_ns, request.ttl_s))
            return alive

        now = await self._checkpoints.update(_key(request.path), changed)
        return _found(now, request.path)

    async def delete(self, request: DeleteCheckpoint) -> Checkpoint:
        """End it; what it was. Raises NotFound. One that has expired can be deleted as well."""
        key = _key(request.path)
        found = _found(await self._checkpoints.get(key), request.path)
        await self._discards.of_checkpoint(key, found)
        await self._checkpoints.delete(key)
        return found

    async def copy(self, request: CopyCheckpoint) -> Checkpoint:
        """The same parts as a checkpoint of another run. Raises NotFound or Gone."""
        now_ns = time.time_ns()
        key = _key(request.path)
        source = _alive(await self._checkpoints.get(key), request.path, now_ns)
        run = await self._runs.get(ids.token(request.model_id))
        if run is None:
            msg = f"model_id: there is no run {request.model_id}"
            raise NotFound(msg)
        path = ids.CheckpointPath(request.model_id, source.kind, source.name)
        made = structs.replace(
            source,
            path=str(path),
            model_id=request.model_id,
            owner=run.owner,
            created_ns=now_ns,
            expires_ns=expires_at(now_ns, request.ttl_s),
            user_metadata={},
            public=False,
            copied_from=source.path,
            log_model_id=source.log_model_id or source.model_id,
        )
        return await self._checkpoints.create(ids.checkpoint_key(path), made)


def _key(path: str) -> str:
    return ids.checkpoint_key(ids.parse_path(path))


def _found(checkpoint: Checkpoint | None, path: str) -> Checkpoint:
    if checkpoint is None:
        msg = f"path: there is no checkpoint {path}"
        raise NotFound(msg)
    return checkpoint


def _alive(checkpoint: Checkpoint | None, path: str, now_ns: int) -> Checkpoint:
    return check_alive(_found(checkpoint, path), now_ns=now_ns)

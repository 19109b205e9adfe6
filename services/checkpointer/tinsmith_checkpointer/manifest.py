"""What a checkpoint is: the manifest made from a commit request. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.adapters import adapter_ref
from tinsmith.errors import InvalidRequest
from tinsmith.ids import CheckpointPath
from tinsmith.messages.checkpoints import Checkpoint
from tinsmith.messages.registry import Sampler
from tinsmith_checkpointer.expiry import expires_at

if TYPE_CHECKING:
    from tinsmith.messages.checkpoints import CommitCheckpoint


def path_of(request: CommitCheckpoint) -> CheckpointPath:
    """Where the checkpoint will be found."""
    return CheckpointPath(request.model_id, request.kind, request.name)


def build(request: CommitCheckpoint, *, owner: str, now_ns: int) -> Checkpoint:
    """The manifest of ``request``, committed at ``now_ns`` (unix time)."""
    return Checkpoint(
        path=str(path_of(request)),
        model_id=request.model_id,
        kind=request.kind,
        name=request.name,
        op_seq=request.op_seq,
        base_model=request.base_model,
        lora=request.lora,
        step=request.step,
        parts=request.parts,
        size_bytes=sum(ref.size for ref in request.parts.values()),
        created_ns=now_ns,
        owner=owner,
        expires_ns=expires_at(now_ns, request.ttl_s),
        user_metadata=request.user_metadata,
        optimizer=request.optimizer,
        published=request.published,
        state_blake3=request.state_blake3,
        base_blake3=request.base_blake3,
        tokenizer_id=request.tokenizer_id,
    )


def sampler_of(
    checkpoint: Checkpoint, sampler_id: str, *, session_id: str, is_inflight: bool
) -> Sampler:
    """The sampling session of an ephemeral checkpoint, which lives and ends with it."""
    return Sampler(
        sampler_id=sampler_id,
        session_id=session_id,
        owner=checkpoint.owner,
        created_ns=checkpoint.created_ns,
        base_model=checkpoint.base_model,
        adapter=adapter_ref(checkpoint),
        follows=checkpoint.model_id if is_inflight else None,
    )


def is_behind(sampler: Sampler, newest: Sampler) -> bool:
    """Whether ``sampler`` follows a model that has saved the weights of ``newest`` since."""
    mine, theirs = sampler.adapter, newest.adapter
    if sampler.follows is None or sampler.follows != newest.follows or not mine or not theirs:
        return False
    return (mine.op_seq or 0) < (theirs.op_seq or 0)


def check_replaces(existing: Checkpoint, request: CommitCheckpoint) -> None:
    """Raises InvalidRequest when the name is taken and may not be overwritten."""
    if not request.overwrite:
        msg = (
            f"path: a checkpoint named {request.name!r} exists (saved by request "
            f"{existing.op_seq}); choose another name or pass overwrite=True"
        )
        raise InvalidRequest(msg)

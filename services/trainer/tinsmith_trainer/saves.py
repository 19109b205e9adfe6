"""What a save asks of the checkpointer, and what it answers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinsmith.messages import ops
from tinsmith.messages.checkpoints import CommitCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import CheckpointKind, CommitCheckpointDone
    from tinsmith.messages.weights import PublishedVersion
    from tinsmith_trainer.trainable import Snapshot

SaveOp = ops.SaveWeights | ops.SaveWeightsForSampler | ops.SaveWeightsExternal

ENCRYPTED_BYTES_S = 20e6
"""What the checkpointer encrypts in a second at least."""


class Origin(NamedTuple):
    """What a checkpoint was made on, and the state it stands for."""

    base_model: str
    base_blake3: str
    tokenizer_id: str
    state_blake3: str


def request(
    op: ops.Op,
    body: SaveOp,
    snapshot: Snapshot,
    parts: dict[str, BlobRef],
    origin: Origin,
    published: PublishedVersion | None = None,
) -> CommitCheckpoint:
    """To make ``parts``, which are ``snapshot``, the checkpoint that ``op`` asks for."""
    session, is_inflight = None, False
    recipients: tuple[str, ...] = ()
    if isinstance(body, ops.SaveWeightsForSampler):
        session, is_inflight = body.sampling_session_id, body.is_inflight
    if isinstance(body, ops.SaveWeightsExternal):
        recipients = body.recipients
    return CommitCheckpoint(
        model_id=op.model_id,
        kind=_kind(body),
        name=body.name or f"ephemeral-{op.seq}",
        op_seq=op.seq,
        base_model=origin.base_model,
        lora=snapshot.lora,
        step=snapshot.step,
        optimizer=snapshot.optimizer.family,
        parts=parts,
        overwrite=body.overwrite,
        ttl_s=body.ttl_s,
        user_metadata=body.user_metadata,
        sampling_session_id=session,
        is_inflight=is_inflight,
        recipients=recipients,
        published=published,
        state_blake3=origin.state_blake3,
        base_blake3=origin.base_blake3,
        tokenizer_id=origin.tokenizer_id,
    )


def encryption_s(request: CommitCheckpoint) -> float:
    """How long the checkpointer may work on ``request`` before it has failed, in seconds."""
    if not request.recipients:
        return 0.0
    return sum(ref.size for ref in request.parts.values()) / ENCRYPTED_BYTES_S


def result(
    body: SaveOp,
    done: CommitCheckpointDone,
    parts: Mapping[str, BlobRef],
    published: PublishedVersion | None = None,
) -> ops.OpResult:
    """What the op answers when it is committed."""
    path, size_bytes, named = done.path, done.size_bytes, dict(parts)
    match body:
        case ops.SaveWeights():
            return ops.SaveWeightsDone(path=path, size_bytes=size_bytes, parts=named)
        case ops.SaveWeightsExternal():
            return ops.SaveWeightsExternalDone(path=path, size_bytes=size_bytes, parts=named)
        case ops.SaveWeightsForSampler(sampling_session_id=session):
            return ops.SaveWeightsForSamplerDone(
                path=None if session else path,
                sampling_session_id=session,
                size_bytes=size_bytes,
                parts=named,
                published=published,
            )


def _kind(body: SaveOp) -> CheckpointKind:
    match body:
        case ops.SaveWeights():
            return "weights"
        case ops.SaveWeightsExternal():
            return "external_weights"
        case ops.SaveWeightsForSampler():
            return "ephemeral" if body.sampling_session_id else "sampler_weights"

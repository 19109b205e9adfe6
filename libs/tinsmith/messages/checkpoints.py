"""Checkpoints: asked for by the trainer and the gateway, committed by the checkpointer."""

from __future__ import annotations

from typing import Literal

from tinsmith.messages.base import BlobRef, Message
from tinsmith.messages.ops import LoraShape, OptimizerFamily
from tinsmith.messages.weights import PublishedVersion

CheckpointKind = Literal["weights", "sampler_weights", "external_weights", "ephemeral"]


class CommitCheckpoint(Message, frozen=True, kw_only=True):
    """Make these parts a checkpoint: the parts are in the blob store, the manifest is not yet.

    Idempotent on ``(model_id, kind, name, op_seq)``. Without ``overwrite``, a name in use by
    another op is an error of category user. An ``ephemeral`` one is named by its sampling
    session and never listed.
    """

    model_id: str
    kind: CheckpointKind
    name: str
    op_seq: int
    base_model: str
    lora: LoraShape
    step: int  # optimizer steps behind these weights
    parts: dict[str, BlobRef]
    overwrite: bool = False
    ttl_s: int | None = None
    user_metadata: dict[str, str] = {}
    sampling_session_id: str | None = None
    is_inflight: bool = False  # the sampling session moves on with later commits of its kind
    optimizer: OptimizerFamily = "adamw"  # of the model
    recipients: tuple[str, ...] = ()  # age's: the checkpoint is the parts encrypted to them
    published: PublishedVersion | None = None  # the same weights on their lineage
    state_blake3: str = ""  # of the state that is saved, as the log has it
    base_blake3: str = ""  # of the base model's weights in memory, as an owner's log entry has it
    tokenizer_id: str = ""  # as clients are told it


class CommitCheckpointDone(Message, frozen=True, kw_only=True):
    """The manifest is durable."""

    path: str
    size_bytes: int


class GetCheckpoint(Message, frozen=True, kw_only=True):
    """Read a checkpoint's manifest by its tinker:// path."""

    path: str


class Checkpoint(Message, frozen=True, kw_only=True):
    """A committed checkpoint: the manifest, and the registry entry of the same bytes."""

    path: str  # tinker://<model_id>/<kind>/<name>
    model_id: str
    kind: CheckpointKind
    name: str
    op_seq: int
    base_model: str
    lora: LoraShape
    step: int
    parts: dict[str, BlobRef]
    size_bytes: int
    created_ns: int  # unix time
    owner: str = ""
    expires_ns: int | None = None
    user_metadata: dict[str, str] = {}
    format: int = 1
    public: bool = False  # readable by every owner
    copied_from: str | None = None  # a path
    optimizer: OptimizerFamily = "adamw"  # of the model that was saved
    published: PublishedVersion | None = None  # the same weights on their lineage
    state_blake3: str = ""  # of the state it stands for, as that log has it; "": imported
    base_blake3: str = ""  # of the base model's weights in memory where it was trained
    tokenizer_id: str = ""
    log_model_id: str = ""  # of a copy: the run in whose log ``op_seq`` is a place


class ChangeCheckpoint(Message, frozen=True, kw_only=True):
    """Set who may read a checkpoint, or when it expires; the caller has checked the owner."""

    path: str
    public: bool | None = None  # None: as it is
    sets_ttl: bool = False
    ttl_s: int | None = None  # with ``sets_ttl``: from now on; None keeps it for ever


class DeleteCheckpoint(Message, frozen=True, kw_only=True):
    """End a checkpoint now; the caller has checked the owner."""

    path: str


class CopyCheckpoint(Message, frozen=True, kw_only=True):
    """Make the parts of one checkpoint another one, of a run that is registered.

    Idempotent on the new path. The source's expiry and metadata stay behind.
    """

    path: str
    model_id: str  # of the copy
    ttl_s: int | None = None


class Discarded(Message, frozen=True, kw_only=True):
    """Parts that something has stopped to refer to: to be freed unless something else does."""

    path: str  # what referred to them
    parts: dict[str, BlobRef]
    discarded_ns: int  # unix time

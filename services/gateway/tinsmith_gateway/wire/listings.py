"""Runs, checkpoints and sessions as the objects that clients list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinsmith_gateway.wire.times import iso_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.ops import OptimizerFamily
    from tinsmith.messages.registry import Run, Session

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def training_run(run: Run, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """``TrainingRun``; ``checkpoints`` are those to be told of, newest first."""
    # The registry does not hear of single requests: a checkpoint is the latest it knows.
    latest_ns = max(run.created_ns, *(c.created_ns for c in checkpoints), 0)
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": run.lora.rank > 0,
        "lora_rank": run.lora.rank or None,
        "corrupted": False,
        "last_request_time": iso_time(latest_ns),
        "last_checkpoint": _last(checkpoints, "weights"),
        "last_sampler_checkpoint": _last(checkpoints, "sampler_weights"),
        "user_metadata": run.user_metadata,
    }


def optimizer_config(family: OptimizerFamily) -> dict[str, Any]:
    """``OptimizerConfig``, as it would be asked for."""
    return {"type": family} | ({"version": 1} if family == "dimuon" else {})


def checkpoint(entry: Checkpoint) -> dict[str, Any]:
    """``Checkpoint``."""
    expires_ns = entry.expires_ns
    return {
        "checkpoint_id": f"{entry.kind}/{entry.name}",
        "checkpoint_type": _TYPES[entry.kind],
        "time": iso_time(entry.created_ns),
        "tinker_path": entry.path,
        "size_bytes": entry.size_bytes,
        "public": entry.public,
        "user_metadata": entry.user_metadata,
        "expires_at": None if expires_ns is None else iso_time(expires_ns),
    }


def session_summary(session: Session, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """``SessionSummary``."""
    return {
        "session_id": session.session_id,
        "created_at": iso_time(session.created_ns),
        "owner": session.owner,
        "project_id": session.project_id or "",
        "status": session_status(session),
        "checkpoints_count": len(checkpoints),
        "display_name": session.display_name,
        "user_metadata": texts(session.user_metadata),
        "checkpoint_storage_bytes": sum(c.size_bytes for c in checkpoints),
    }


def session_status(session: Session) -> dict[str, Any]:
    """``SessionStatus``; one that fell silent counts as cancelled."""
    match session.status:
        case "active":
            return {"type": "active"}
        case "expired":
            return {"type": "cancelled", "detail": session.detail}
        case "finished":
            reason = {"type": session.finish_reason or "success"}
            return {"type": "client_finished", "reason": reason, "detail": session.detail or None}


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata for those answers in which clients take texts only."""
    return {key: value if isinstance(value, str) else str(value) for key, value in metadata.items()}


def _last(checkpoints: Sequence[Checkpoint], kind: str) -> dict[str, Any] | None:
    return next((checkpoint(c) for c in checkpoints if c.kind == kind), None)

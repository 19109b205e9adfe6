"""When checkpoints, samplers and sessions end for good. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.errors import Gone

if TYPE_CHECKING:
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import Sampler, Session

NS = 10**9
RESULTS_S = 6 * 3600.0  # how long results of sampling can be read, which needs the sampler's entry


def expires_at(now_ns: int, ttl_s: int | None) -> int | None:
    """When something ends that lives for ``ttl_s`` from now on; None: never. Unix time in ns."""
    return None if ttl_s is None else now_ns + ttl_s * NS


def is_expired(checkpoint: Checkpoint, *, now_ns: int, since_s: float = 0.0) -> bool:
    """Whether its time to live has been over for ``since_s``."""
    expires_ns = checkpoint.expires_ns
    return expires_ns is not None and now_ns - expires_ns >= since_s * NS


def check_alive(checkpoint: Checkpoint, *, now_ns: int) -> Checkpoint:
    """``checkpoint`` itself; Gone once its time to live is over."""
    if is_expired(checkpoint, now_ns=now_ns):
        late_s = (now_ns - (checkpoint.expires_ns or 0)) // NS
        msg = f"{checkpoint.path}: expired {late_s} s ago; save it again, with a longer ttl_seconds"
        raise Gone(msg)
    return checkpoint


def is_over(session: Session, *, now_ns: int, since_s: float) -> bool:
    """Whether the session ended ``since_s`` ago or earlier."""
    if session.status == "active":
        return False
    ended_ns = session.created_ns if session.ended_ns is None else session.ended_ns
    return now_ns - ended_ns >= since_s * NS


def is_left_over(sampler: Sampler, session: Session | None, *, now_ns: int) -> bool:
    """Whether nothing can be asked of the sampler, nor any result of it be read, any more."""
    if session is None:
        return now_ns - sampler.created_ns >= RESULTS_S * NS
    has_own_weights = sampler.adapter is not None and sampler.model_path is None
    return has_own_weights and is_over(session, now_ns=now_ns, since_s=RESULTS_S)

"""The checkpointer's settings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tinsmith.config import Section


class CheckpointerConfig(Section, frozen=True, kw_only=True):
    """Settings of ``[checkpointer]``."""

    max_parts: Annotated[int, Meta(ge=1)] = 4096
    """Most files that one checkpoint may consist of."""
    upkeep_s: Annotated[float, Meta(gt=0)] = 300.0
    """How often it is looked for what has expired, and for parts that can be freed."""
    free_bytes: bool = True
    """Delete the bytes of checkpoints that ended, and blobs that nothing refers to. Only when no
    other installation of Tinsmith has its blobs in the same folder, or under the same URL."""
    collect_hours: Annotated[float, Meta(ge=0)] = 24.0
    """How often all blobs are compared with what needs them, to find those that a save which died
    has left; 0: only when ``tinsmith gc`` is run."""
    grace_s: Annotated[float, Meta(gt=0)] = 86400.0
    """How long such bytes are kept nevertheless, for who reads or saves the same ones now."""
    expired_days: Annotated[float, Meta(ge=0)] = 30.0
    """For how long an expired checkpoint is still known by its name, so that whoever asks for it
    is told when it expired."""
    session_days: Annotated[float, Meta(ge=0)] = 400.0
    """For how long an ended session is kept, with its samplers. Its training runs stay."""
    meter_s: Annotated[float, Meta(gt=0)] = 60.0
    """How often what was used is counted."""
    usage_days: Annotated[float, Meta(ge=14)] = 400.0
    """For how long the counts are kept."""
    anchor_s: Annotated[float, Meta(gt=0)] = 60.0
    """How often the heads of the logs that have grown are anchored, in seconds."""

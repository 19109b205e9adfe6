"""The checkpointer's settings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tinsmith.config import Section


class CheckpointerConfig(Section, frozen=True, kw_only=True):
    """Settings of ``[checkpointer]``."""

    max_parts: Annotated[int, Meta(ge=1)] = 4096
    """Most files that one checkpoint may consist of."""

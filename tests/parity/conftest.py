"""What all comparisons with the independent script share."""

from __future__ import annotations

from tests.threads import one_thread

__all__ = ["one_thread"]

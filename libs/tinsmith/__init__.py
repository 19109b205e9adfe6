"""Tinsmith: an open training server for the Tinker protocol."""

from __future__ import annotations

__version__ = "0.1.0"

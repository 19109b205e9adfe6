"""The command line. Nothing heavy is imported before a command is chosen."""

from __future__ import annotations

from tinsmith.cli.app import main

__all__ = ["main"]

"""``python -m tinsmith``."""

from __future__ import annotations

from tinsmith.cli import main

main()

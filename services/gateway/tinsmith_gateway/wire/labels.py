"""Names that users give to things and that mean nothing to the server."""

from __future__ import annotations

import re

from tinsmith.errors import InvalidRequest

_PROJECT_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}")


def check_project(text: str, field: str = "project_id") -> str:
    """``text`` itself when it can name a project; InvalidRequest otherwise."""
    if _PROJECT_RE.fullmatch(text) is None:
        raise InvalidRequest(
            f"{field}: {text[:80]!r} cannot name a project; use 1 to 128 letters, digits or "
            "'_.:@-', starting with a letter or digit (TINKER_PROJECT_ID sets it)"
        )
    return text

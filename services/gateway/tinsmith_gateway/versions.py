"""Which versions of the tinker client are served: those that ``make test-clients`` tries."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinsmith.errors import NotSupported

if TYPE_CHECKING:
    from collections.abc import Mapping

API = "/api/v1/"
HEADER = "X-Stainless-Package-Version"
"""The client's own version, which it sends with every request."""
OLDEST = (0, 18)
NEWEST = (0, 38)
RANGE = {"oldest": "0.18", "newest": "0.38"}

_VERSION_RE = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})(?![0-9])")


def check_client(path: str, headers: Mapping[str, str]) -> None:
    """NotSupported for a client that says it is of another version; one that says none may go on.

    Its requests would fail later, and less clearly: a field that is not known here is ignored.
    """
    if not path.startswith(API) or (told := headers.get(HEADER)) is None:
        return
    match = _VERSION_RE.match(told)
    if match is None or OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        return
    raise NotSupported(
        f"tinker {told[:40]!r}: this server serves clients from {RANGE['oldest']} to "
        f"{RANGE['newest']}; install one of these, e.g. pip install 'tinker=={RANGE['newest']}.*'"
    )

"""The dashboard's page: its files, which hold no data, and what browsers are told about them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}

HEADERS = {
    # Nothing from elsewhere, nothing inline: text of a user that got into the page would be inert.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # to be asked for again, by its ETag
}


class PageFile(NamedTuple):
    """A file as it is sent."""

    body: bytes
    content_type: str
    etag: str


def read() -> dict[str, PageFile]:
    """Every file by its name. What is not here does not exist: no path of a request is opened."""
    return {
        path.name: PageFile(body, _TYPES[path.suffix], blake3(body).hexdigest(8))
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file()
        for body in (path.read_bytes(),)
    }

"""Open mode: what counts as this machine, so that no other, and no web page, gets in keyless."""

from __future__ import annotations

import functools
import ipaddress
import urllib.parse


def is_loopback(host: str) -> bool:
    """Whether a host name or address can mean nothing but this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@functools.lru_cache(256)  # every request asks, and few differ
def is_local(host_header: str, origin: str | None) -> bool:
    """Whether a request was sent to this machine by name, and by no page from elsewhere.

    A browser here can be made to send requests for a page of somebody else: such a page has
    another ``Origin``, or, when its name was bound to our address, another ``Host``.
    """
    try:
        sent_to = urllib.parse.urlsplit(f"//{host_header}").hostname or ""
        sent_by = urllib.parse.urlsplit(origin or "").hostname or ""
    except ValueError:  # no address at all, as "[" is none
        return False
    return is_loopback(sent_to) and (origin is None or is_loopback(sent_by))

"""How calls to an SGLang server fail.

SglangError
├── SglangRefused   the server said no; the same call gets the same answer
├── SglangUnsafe    refused here: the server would hang, die, or answer with other weights
├── SglangAborted   the server gave a request up, though nobody had asked for that
└── SglangGone      no answer, or half of one: the server died, hangs, or cannot be reached
"""

from __future__ import annotations


class SglangError(Exception):
    """Root of them."""


class SglangRefused(SglangError):
    """The server answered that it will not; its words are in ``message``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"SGLang refused ({status}): {message}")
        self.status = status
        self.message = message


class SglangUnsafe(SglangError):
    """Never sent, for what it would do to the server; a fault of the caller."""


class SglangAborted(SglangError):
    """The server ended a request before its end; the same one may be sent again."""


class SglangGone(SglangError):
    """The server cannot be reached, broke off, or failed within."""

"""Files encrypted to recipients' public keys in age's format (age-encryption.org/v1).

Only whoever has one of the private keys reads them; this server has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyrage

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

SUFFIX = ".age"
"""Behind the name of an encrypted file."""

MAX_RECIPIENTS = 10
MAX_CHARS = 8192  # of one: an RSA key of 16384 bits has less than half


def check_recipients(texts: Sequence[str], field: str) -> tuple[str, ...]:
    """``texts`` themselves, when something can be encrypted to each; InvalidRequest otherwise."""
    if len(texts) > MAX_RECIPIENTS:
        raise InvalidRequest(
            f"{field}: {len(texts)} recipients are over the limit of {MAX_RECIPIENTS}; encrypt to "
            "one key whose private half you share"
        )
    for index, text in enumerate(texts):
        reason = _problem(text)
        if reason:
            raise InvalidRequest(
                f"{field}[{index}]: {text[:80]!r} is no age recipient ({reason}); give a key that "
                "begins with age1, or an SSH public key of type ssh-ed25519 or ssh-rsa"
            )
    return tuple(texts)


def encrypt(data: bytes, recipients: Sequence[str]) -> bytes:
    """``data`` for whoever has the private key to any of the ``recipients``, who were checked.

    Every call gives other bytes. Takes long for large files, but leaves other threads alone.
    """
    sealed: bytes = pyrage.encrypt(data, [_recipient(text) for text in recipients])
    return sealed


def _problem(text: str) -> str:
    """Why nothing can be encrypted to ``text``; empty when it can."""
    if len(text) > MAX_CHARS:
        return f"{len(text)} characters are over {MAX_CHARS}"
    try:
        encrypt(b"", [text])
    except (pyrage.RecipientError, pyrage.EncryptError, ValueError) as exc:
        return str(exc)[:200]
    except BaseException as exc:
        # Keys that are well-formed but worthless end in a panic of the library, which is no
        # Exception and cannot be imported.
        if type(exc).__name__ != "PanicException":
            raise
        return "the key is malformed"
    return ""


def _recipient(text: str) -> Any:  # noqa: ANN401 - the library has no types
    parse = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    return parse.Recipient.from_str(text)

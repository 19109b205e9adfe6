"""One run's seal: what makes its payloads unreadable, and what their digests are keyed with. Pure.

    sealed bytes    MAGIC, nonce, AES-256-GCM-SIV of the plaintext and its tag

The nonce is a keyed hash of the plaintext. So equal plaintexts of one run give equal bytes, which
keeps resent requests idempotent and blobs stored once; and if two nonces should ever meet,
AES-GCM-SIV (RFC 8452) gives away no more than whether two plaintexts are equal.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol, TypeVar

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV

from tinsmith.errors import Forgotten, SealBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.errors import TinsmithError
    from tinsmith.messages.registry import ForgottenRun

T = TypeVar("T")

KEY_BYTES = 32
MAGIC = b"\xc1ts1"
"""No message begins so: msgpack never uses 0xc1."""
NONCE_BYTES = 12
TAG_BYTES = 16
THREAD_BYTES = 256 << 10
"""Larger payloads are sealed and opened on a thread: the event loop has the broker to answer."""


class Seal(Protocol):
    """How the payloads of one run are kept."""

    scheme: str
    """What records say in ``sealed``: "" for plain, "v1" for what is described above."""

    @property
    def why_closed(self) -> TinsmithError | None:
        """What every use of it raises; None while it can be used."""

    def seal(self, data: bytes) -> bytes:
        """``data`` as it is stored; equal for equal ``data``."""

    def open(self, data: bytes) -> bytes:
        """The bytes that were sealed.

        Raises:
            Forgotten: the run's key was destroyed.
            SealBroken: there is no key for them here, or they were changed.
        """

    def digest(self, data: bytes) -> str:
        """Digest of the plaintext ``data`` in hex; nobody can guess ``data`` by it without the key.

        Raises:
            Forgotten, SealBroken: as ``open``.
        """


class PlainSeal:
    """No seal: payloads of runs that were created with sealing off, and of old logs."""

    scheme = ""
    why_closed = None

    def seal(self, data: bytes) -> bytes:
        """``data``."""
        return data

    def open(self, data: bytes) -> bytes:
        """``data``."""
        return data

    def digest(self, data: bytes) -> str:
        """Its blake3."""
        return blake3(data).hexdigest()


PLAIN = PlainSeal()


class KeySeal:
    """The seal of a run whose key is at hand, until it is revoked."""

    scheme = "v1"

    def __init__(self, key: bytes) -> None:
        self._keys: _Keys | TinsmithError = _Keys(key)

    @staticmethod
    def new_key() -> bytes:
        """A key for a new run."""
        return secrets.token_bytes(KEY_BYTES)

    @property
    def why_closed(self) -> TinsmithError | None:
        """See ``Seal``."""
        return None if isinstance(self._keys, _Keys) else self._keys

    @property
    def key(self) -> bytes:
        """The run's key; raises as ``open``."""
        return self._usable().key

    def revoke(self, why: TinsmithError) -> None:
        """Drop the key; from now on everything raises ``why``."""
        self._keys = why

    def seal(self, data: bytes) -> bytes:
        """See ``Seal``; raises as ``open``."""
        keys = self._usable()
        nonce = blake3(data, key=keys.nonces).digest(NONCE_BYTES)
        return MAGIC + nonce + keys.cipher.encrypt(nonce, data, MAGIC)

    def open(self, data: bytes) -> bytes:
        """See ``Seal``."""
        keys = self._usable()
        start = len(MAGIC) + NONCE_BYTES
        if not is_sealed(data) or len(data) < start + TAG_BYTES:
            raise SealBroken(f"{len(data)} bytes that should be sealed are not")
        view = memoryview(data)
        try:
            return keys.cipher.decrypt(view[len(MAGIC) : start], view[start:], MAGIC)
        except InvalidTag as exc:
            raise SealBroken(
                f"{len(data)} sealed bytes cannot be opened: they were changed, or sealed under "
                "another key"
            ) from exc

    def digest(self, data: bytes) -> str:
        """See ``Seal``."""
        return blake3(data, key=self._usable().digests).hexdigest()

    def _usable(self) -> _Keys:
        if isinstance(self._keys, _Keys):
            return self._keys
        raise _anew(self._keys)


class ClosedSeal:
    """The seal of a run whose key is gone or not at hand: every use raises ``why``."""

    scheme = KeySeal.scheme

    def __init__(self, why: TinsmithError, forgotten: ForgottenRun | None = None) -> None:
        self.why_closed = why
        self.forgotten = forgotten
        """What the registry says, if that is why."""

    @classmethod
    def of(cls, entry: ForgottenRun) -> ClosedSeal:
        """Of a run that was forgotten."""
        reason = f" ({entry.reason})" if entry.reason else ""
        why = (
            f"the contents of run {entry.model_id} were forgotten on {moment(entry.forgotten_ns)}"
            f"{reason}: their key was destroyed, and nobody can read them any more"
        )
        return cls(Forgotten(why), entry)

    def seal(self, data: bytes) -> bytes:  # noqa: ARG002
        """Raises."""
        raise _anew(self.why_closed)

    def open(self, data: bytes) -> bytes:  # noqa: ARG002
        """Raises."""
        raise _anew(self.why_closed)

    def digest(self, data: bytes) -> str:  # noqa: ARG002
        """Raises."""
        raise _anew(self.why_closed)


class _Keys:
    """What is derived from a run's key: one key for each use."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.cipher = AESGCMSIV(_derived(key, "tinsmith 2026-11 payload cipher"))
        self.nonces = _derived(key, "tinsmith 2026-11 payload nonces")
        self.digests = _derived(key, "tinsmith 2026-11 payload digests")


def _anew(why: TinsmithError) -> TinsmithError:
    """A fresh one for each raise: an exception collects the places where it was raised."""
    return type(why)(*why.args)


def _derived(key: bytes, context: str) -> bytes:
    return blake3(key, derive_key_context=context).digest()


def moment(unix_ns: int) -> str:
    """Unix time in ns as a date and time in UTC, to the second."""
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def is_sealed(data: bytes) -> bool:
    """Whether these are sealed bytes, by how they begin."""
    return data.startswith(MAGIC)


def suited(seal: Seal, scheme: str) -> Seal:
    """What opens a record that says ``scheme``, in a run whose seal is ``seal``."""
    if not scheme:
        return PLAIN
    if scheme == seal.scheme:
        return seal
    if not seal.scheme:
        return ClosedSeal(SealBroken("the contents are sealed, and their key is not here"))
    return ClosedSeal(SealBroken(f"sealed as {scheme[:20]!r}, by a newer version of Tinsmith"))


async def aside(call: Callable[[bytes], T], data: bytes) -> T:
    """``call(data)``, on a thread when there is much of it: for a seal's three methods."""
    if len(data) <= THREAD_BYTES:
        return call(data)
    return await asyncio.to_thread(call, data)

"""The master key: where it comes from, and the wrapping of runs' keys with it."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import secrets
import shlex
import subprocess
import tempfile
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tinsmith.errors import SealBroken, StartupError
from tinsmith.sealing.seal import KEY_BYTES, NONCE_BYTES

COMMAND_TIMEOUT_S = 30.0
FINGERPRINT_BYTES = 8
COMMAND = "sealing.master_key_command"


class MasterKey:
    """Wraps the keys of runs."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(blake3(key, derive_key_context="tinsmith 2026-11 wrapping").digest())
        fingerprint = blake3(key, derive_key_context="tinsmith 2026-11 master fingerprint")
        self.fingerprint = fingerprint.hexdigest(FINGERPRINT_BYTES)
        """Tells master keys apart, and gives nothing away."""

    def wrap(self, model_id: str, key: bytes) -> bytes:
        """``key``, of use only with this master key and for ``model_id``."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, key, model_id.encode())

    def unwrap(self, model_id: str, wrapped: bytes) -> bytes:
        """The opposite of ``wrap``; SealBroken when these are not its bytes."""
        try:
            return self._cipher.decrypt(
                wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], model_id.encode()
            )
        except (InvalidTag, ValueError) as exc:
            raise SealBroken(
                f"the key of run {model_id} cannot be unwrapped by master key {self.fingerprint}: "
                "its registry entry was changed"
            ) from exc


class KeySource:
    """Where the master key of this machine is: a command's output, or a file."""

    def __init__(self, command: str, file: Path) -> None:
        self._command = command
        self._file = file

    def __str__(self) -> str:
        return f"{COMMAND} ({self._command!r})" if self._command else str(self._file)

    def find(self) -> MasterKey | None:
        """The master key; None when there is no command, and no file yet.

        Raises:
            StartupError: the command fails, or what it prints or the file holds is no key.
        """
        if self._command:
            return MasterKey(_decoded(self._printed(), COMMAND))
        try:
            return MasterKey(_decoded(self._file.read_bytes(), str(self._file)))
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise StartupError(f"{self._file}: cannot be read: {exc.strerror}") from exc

    def make(self) -> None:
        """Write a new key to the file, unless there is one: several services may do so at once."""
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(prefix=".master.key.", dir=self._file.parent)  # mode 0600
            draft = Path(name)
            try:
                os.write(fd, base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n")
                os.fsync(fd)
                # Unlike a rename, a link leaves what is there: of several services the first wins.
                with contextlib.suppress(FileExistsError):
                    self._file.hardlink_to(draft)
            finally:
                os.close(fd)
                draft.unlink()
        except OSError as exc:
            raise StartupError(f"{self._file}: cannot be made: {exc.strerror}") from exc

    def _printed(self) -> bytes:
        # Neither its output nor its errors are repeated in a message: they may hold the key.
        try:
            done = subprocess.run(
                shlex.split(self._command),
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except (OSError, ValueError) as exc:
            raise StartupError(f"{COMMAND} = {self._command!r}: cannot be run: {exc}") from exc
        except subprocess.TimeoutExpired as exc:
            raise StartupError(
                f"{COMMAND} = {self._command!r}: has not ended within {COMMAND_TIMEOUT_S:g} s"
            ) from exc
        if done.returncode:
            raise StartupError(
                f"{COMMAND} = {self._command!r}: ended with exit code {done.returncode}; run it by "
                "hand to see why"
            )
        return done.stdout


def _decoded(text: bytes, where: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise StartupError(
            f"{where}: is not a master key; it must be {KEY_BYTES} bytes in base64, such as "
            f"'openssl rand -base64 {KEY_BYTES}' prints"
        )
    return key

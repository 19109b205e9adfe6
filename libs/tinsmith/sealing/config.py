"""The settings of sealing."""

from __future__ import annotations

from tinsmith.config import Section


class SealingConfig(Section, frozen=True, kw_only=True):
    """Settings of ``[sealing]``; the same for every service of an installation."""

    enabled: bool = True
    """Seal the payloads of new runs, so that they can be forgotten. Runs that exist stay as they
    are: sealed ones need the master key whatever this says."""
    master_key_command: str = ""
    """A command that prints the master key, 32 bytes in base64, as a secret store's client does;
    it is run without a shell. Empty: the file ``master.key`` in ``data_dir``, which the first
    service makes. Every service must get the same key."""

"""How much of an owner's may be unfinished, and with the samplers, at a time.

What its keys say, else the configuration. Of several keys of one owner the largest limit counts:
they share what they make, and what they wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinsmith.bus.views import View
    from tinsmith.messages.registry import ApiKey
    from tinsmith_gateway.config import GatewayConfig


class Limits:
    """Each owner's, read anew at each request: changed keys count at once."""

    def __init__(self, config: GatewayConfig, keys: View[ApiKey]) -> None:
        self._config = config
        self._keys = keys

    def max_unfinished(self, owner: str) -> int:
        """Requests that are not done; more are refused."""
        given = [key.max_unfinished for key in self._valid(owner) if key.max_unfinished is not None]
        return max(given, default=self._config.max_unfinished)

    def sampling_share(self, owner: str) -> int:
        """Sampling requests that samplers are given; more are held."""
        given = [key.sampling_share for key in self._valid(owner) if key.sampling_share is not None]
        return max(given, default=self._config.sampling_share)

    def _valid(self, owner: str) -> list[ApiKey]:
        return [key for key in self._keys.group(owner) if key.revoked_ns is None]

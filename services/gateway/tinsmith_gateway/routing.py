"""Which pool of samplers a request goes to, and which of its shares.

In a pool that nobody has announced it would wait for ever, so such a one is as good as none. One
that has no sampler now is all right: the model's other samplers see to its requests then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.errors import InvalidRequest
from tinsmith.pools import DEFAULT_POOL, check_pool, share_of
from tinsmith_gateway.whereabouts import sample_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tinsmith.messages.registry import Session
    from tinsmith.messages.sampling import Sample
    from tinsmith_gateway.registry import Registry

WISH = "tinsmith_pool"
"""The key of a session's ``user_metadata`` that names the pool to sample from."""


class Routing:
    """Where samples go: as the operator says, else as their client wishes, else by default."""

    def __init__(self, pins: Mapping[str, str], registry: Registry) -> None:
        self._pins = pins
        self._registry = registry

    def tokens(self, owner: str, sample: Sample) -> dict[str, str]:
        """What fills the subject of a request."""
        pool = self._pool(owner, sample)
        tokens = sample_tokens(sample.base_model, sample.sampler_id, sample.seq)
        return tokens | {"share": share_of(pool, sample)}

    def check(self, session: Session, base_model: str) -> None:
        """InvalidRequest when a session wishes for a pool that the model has not."""
        if (wish := session.user_metadata.get(WISH)) is None:
            return
        field = f"user_metadata.{WISH}"
        known = self._announced(base_model)
        if check_pool(wish, field) not in known:
            there_are = ", ".join(map(repr, sorted(known)))
            raise InvalidRequest(
                f"{field}: {base_model!r} has no samplers of pool {wish!r}; there are {there_are}"
            )

    def _pool(self, owner: str, sample: Sample) -> str:
        known = self._announced(sample.base_model)
        return next((p for p in self._wanted(owner, sample) if p in known), DEFAULT_POOL)

    def _wanted(self, owner: str, sample: Sample) -> Iterator[str]:
        names = [owner, *(key.name for key in self._registry.api_keys.group(owner))]
        if sample.adapter is not None:
            names.insert(0, sample.adapter.model_id)
        yield from (self._pins[name] for name in names if name in self._pins)
        session = self._registry.session_now(ids.session_of(sample.sampler_id))
        if session is not None and isinstance(wish := session.user_metadata.get(WISH), str):
            yield wish
        if sample.base_model in self._pins:
            yield self._pins[sample.base_model]

    def _announced(self, base_model: str) -> set[str]:
        served = self._registry.served.group(base_model)
        return {model.pool for model in served if model.role == "sampler"} | {DEFAULT_POOL}

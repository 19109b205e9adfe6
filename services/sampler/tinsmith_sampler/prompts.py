"""Prompts whose keys and values are in the cache, for rows that continue them or begin alike.

The rows of a request share its prompt; afterwards it stays until its room is needed.

A prompt is computed in stretches of ``STRETCH`` tokens that begin at its multiples. What is reused
of another prompt are whole stretches, so that a token's bits never depend on what was cached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from numpy.typing import NDArray

    from tinsmith_sampler.kv_cache import Extent, KvCache

STRETCH = 128

_MOST_KEPT = 128
"""Idle prompts kept at most: each holds logits of the whole vocabulary beside its KV."""


@dataclass(eq=False, slots=True)
class Prompt:
    """Tokens under one adapter version; the first ``filled`` of them are in the cache.

    ``needs_from``: logits are needed of the positions from here on (the last one at least).
    """

    tokens: NDArray[np.int32]
    version: str | None
    extent: Extent
    needs_from: int
    filled: int = 0
    reused: int = 0  # tokens that another prompt's pass had computed
    users: int = 0  # tasks that still need it
    last_logits: torch.Tensor | None = field(default=None, repr=False)  # float32 [V], once filled

    @property
    def is_filled(self) -> bool:
        """Whether rows may start from it."""
        return self.last_logits is not None

    def next_stretch(self) -> slice:
        """The tokens that the next pass computes."""
        end = (self.filled // STRETCH + 1) * STRETCH
        return slice(self.filled, min(end, len(self.tokens)))

    @property
    def key(self) -> tuple[str | None, bytes]:
        """What names it: adapter version and tokens."""
        return self.version, self.tokens.tobytes()


class PromptCache:
    """The prompts in the KV cache, the least recently used first."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._prompts: dict[tuple[str | None, bytes], Prompt] = {}

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts.values())

    def find(self, tokens: NDArray[np.int32], version: str | None) -> Prompt | None:
        """The same prompt under the same adapter version."""
        prompt = self._prompts.pop((version, tokens.tobytes()), None)
        if prompt is not None:
            self._prompts[prompt.key] = prompt  # now the most recently used
        return prompt

    def enter(self, prompt: Prompt) -> None:
        """Add a new prompt, with what is already known of its beginning copied into it.

        Where the same one is there already (it cannot be shared with a score, which needs more
        logits) the newcomer stays outside and is given back when its users are done.
        """
        source, length = self._best_start(prompt)
        if source is not None and length:
            self._cache.copy(source.extent, prompt.extent, length)
            prompt.filled = prompt.reused = length
        self._prompts.setdefault(prompt.key, prompt)
        idle = [one for one in self if not one.users and one is not prompt]
        for one in idle[: max(0, len(idle) - _MOST_KEPT)]:
            self._drop(one)

    def release(self, prompt: Prompt) -> None:
        """One user needs it no longer."""
        prompt.users -= 1
        if not prompt.users and self._prompts.get(prompt.key) is not prompt:
            self._cache.give(prompt.extent)

    def evict(self) -> bool:
        """Give back the idle prompt unused for longest; False when there is none."""
        for prompt in self:
            if not prompt.users:
                self._drop(prompt)
                return True
        return False

    def evict_all(self) -> None:
        """Give back all idle prompts."""
        while self.evict():
            pass

    def discard(self, prompt: Prompt) -> None:
        """Forget a prompt whose pass failed; its room goes back with its last user."""
        if self._prompts.get(prompt.key) is prompt:
            del self._prompts[prompt.key]

    def _drop(self, prompt: Prompt) -> None:
        del self._prompts[prompt.key]
        self._cache.give(prompt.extent)

    def _best_start(self, prompt: Prompt) -> tuple[Prompt | None, int]:
        """The prompt with the longest start in common, and how much of it is of use."""
        best: tuple[Prompt | None, int] = (None, 0)
        for other in self:
            if other.version != prompt.version:
                continue
            shared = min(_common(prompt.tokens, other.tokens), other.filled, prompt.needs_from)
            shared -= shared % STRETCH
            if shared > best[1]:
                best = (other, shared)
        return best


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens two sequences have in common at their start."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length

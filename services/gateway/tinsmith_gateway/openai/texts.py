"""Tokens of texts and texts of tokens, asked of the samplers; what a token spells is kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from tinsmith import ids
from tinsmith.errors import BrokerUnavailable, NoResponder
from tinsmith.messages.table import RENDER_CHAT, SPELL_TOKENS, TOKENIZE_TEXT
from tinsmith.messages.texts import RenderChat, SpellTokens, TokenizeText

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from tinsmith.bus import Bus
    from tinsmith.messages.texts import ChatMessage, PromptRendered, TokenPiece

PATIENCE_S = 30.0  # a long text on a busy machine takes a while
SPELL_S = 2.0  # and a few tokens do not
RETRY_S = 0.5
MOST_AT_ONCE = 8192  # tokens of one question


class Texts:
    """All base models' texts.

    Every call raises NoResponder when no sampler of the model runs, BrokerUnavailable when none
    answers, as when it dies meanwhile, and NotSupported when the model has no tokenizer.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._pieces: dict[str, dict[int, TokenPiece]] = {}

    async def tokenize(self, base_model: str, text: str) -> NDArray[np.int32]:
        """Text as a prompt, int32 [n]; InvalidRequest, TooLarge when it is too long."""
        pool = ids.pool_token(base_model)
        asked = TokenizeText(text=text)
        return _tokens(await self._bus.call(TOKENIZE_TEXT, asked, timeout_s=PATIENCE_S, pool=pool))

    async def render(self, base_model: str, messages: tuple[ChatMessage, ...]) -> NDArray[np.int32]:
        """A conversation as a prompt, int32 [n]; raises as ``tokenize``."""
        pool = ids.pool_token(base_model)
        asked = RenderChat(messages=messages)
        return _tokens(await self._bus.call(RENDER_CHAT, asked, timeout_s=PATIENCE_S, pool=pool))

    async def spell(
        self, base_model: str, tokens: Iterable[int], *, patience_s: float = 0.0
    ) -> Mapping[int, TokenPiece]:
        """Pieces by token: at least those of ``tokens``.

        For ``patience_s`` it is asked again when there is no answer: another sampler may come.
        """
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + patience_s
        while True:
            try:
                return await self._spell(base_model, tokens)
            except (NoResponder, BrokerUnavailable):
                if clock() >= give_up_at:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _spell(self, base_model: str, tokens: Iterable[int]) -> Mapping[int, TokenPiece]:
        known = self._pieces.setdefault(base_model, {})
        missing = sorted(set(tokens) - known.keys())
        for first in range(0, len(missing), MOST_AT_ONCE):
            asked = missing[first : first + MOST_AT_ONCE]
            spelled = await self._bus.call(
                SPELL_TOKENS,
                SpellTokens(tokens=np.array(asked, dtype="<i4").tobytes()),
                timeout_s=SPELL_S,
                pool=ids.pool_token(base_model),
            )
            known |= zip(asked, spelled.pieces, strict=True)
        return known


def _tokens(rendered: PromptRendered) -> NDArray[np.int32]:
    return np.frombuffer(rendered.tokens, dtype="<i4").astype(np.int32, copy=False)

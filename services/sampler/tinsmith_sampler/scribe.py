"""Text to tokens and back, with the base model's own tokenizer and chat template, for gateways.

One thread does it all: a long text takes a while, and tokenizers are not made to be shared.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import jinja2
import numpy as np

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith.messages import table
from tinsmith.messages.texts import PromptRendered, TokensSpelled
from tinsmith_sampler.loading import load_tokenizer
from tinsmith_sampler.spelling import Spelling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from transformers import PreTrainedTokenizerBase

    from tinsmith.bus import Bus
    from tinsmith.messages.texts import RenderChat, SpellTokens, TokenizeText

T = TypeVar("T")

_REFUSALS = (jinja2.TemplateError, LookupError, TypeError, ValueError)
"""What a template raises that finds something else than it was written for."""


class Scribe:
    """Answers what gateways ask about the texts of one base model."""

    def __init__(self, source: str, context_length: int) -> None:
        self._tokenizer = load_tokenizer(source)
        self._spelling: Spelling | None = None  # made when it is first needed
        self._context_length = context_length
        self._thread = ThreadPoolExecutor(1, "scribe")

    @asynccontextmanager
    async def serving(self, bus: Bus, pool: str) -> AsyncIterator[None]:
        """Inside the block it answers, side by side with the other samplers of the pool."""
        async with AsyncExitStack() as served:
            served.callback(self._thread.shutdown, wait=False)
            for subscription in (
                await bus.serve(table.TOKENIZE_TEXT, self.tokenize, pool=pool),
                await bus.serve(table.RENDER_CHAT, self.render, pool=pool),
                await bus.serve(table.SPELL_TOKENS, self.spell, pool=pool),
            ):
                served.push_async_callback(subscription.close)
            yield

    async def tokenize(self, asked: TokenizeText) -> PromptRendered:
        """Raises InvalidRequest for more tokens than the context has, NotSupported."""
        tokenizer = self._require()
        return await self._run(lambda: self._prompt(tokenizer.encode(asked.text)))

    async def render(self, asked: RenderChat) -> PromptRendered:
        """Raises InvalidRequest when the template refuses the conversation; else as above."""
        return await self._run(lambda: self._render(self._require(), asked))

    async def spell(self, asked: SpellTokens) -> TokensSpelled:
        """Raises NotSupported without a tokenizer."""
        self._require()
        return await self._run(lambda: self._spell(asked))

    def _render(self, tokenizer: PreTrainedTokenizerBase, asked: RenderChat) -> PromptRendered:
        if not tokenizer.chat_template:
            raise NotSupported(
                "messages: this model has no chat template; use /v1/completions with a prompt"
            )
        messages = [{"role": one.role, "content": one.content} for one in asked.messages]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except _REFUSALS as error:
            raise InvalidRequest(
                f"messages: the model's chat template does not take them ({error}); change their "
                "roles or their order"
            ) from error
        # The template has written the marks that the tokenizer would put before a text.
        return self._prompt(tokenizer.encode(str(text), add_special_tokens=False))

    def _prompt(self, tokens: list[int]) -> PromptRendered:
        if len(tokens) > self._context_length:
            raise InvalidRequest(
                f"prompt: {len(tokens)} tokens are over the model's context of "
                f"{self._context_length}; shorten it"
            )
        return PromptRendered(tokens=np.array(tokens, dtype="<i4").tobytes())

    def _spell(self, asked: SpellTokens) -> TokensSpelled:
        if self._spelling is None:
            self._spelling = Spelling(self._require())
        tokens = np.frombuffer(asked.tokens, dtype="<i4").tolist()
        return TokensSpelled(pieces=tuple(map(self._spelling.piece, tokens)))

    def _require(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise NotSupported(
                "model: it was given to the sampler without a tokenizer; only clients that send "
                "tokens can use it"
            )
        return self._tokenizer

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

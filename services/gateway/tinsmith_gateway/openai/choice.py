"""One continuation on its way to a client: tokens as they are told, and in the end the result."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import BrokerUnavailable, NoResponder, ServerError
from tinsmith_gateway.openai.passage import Passage, Token

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.messages.sampling import RoutedExperts, Sequence, TokensDrawn, TopK
    from tinsmith_gateway.openai.passage import Stretch
    from tinsmith_gateway.openai.texts import Texts


PATIENCE_S = 120.0
"""For a sampler to come that tells what the tokens of a result spell."""


class Choice:
    """Its tokens are taken once, in order; what was not told comes with the result."""

    def __init__(
        self,
        index: int,
        texts: Texts,
        base_model: str,
        stops: Iterable[str],
        *,
        wants_experts: bool = False,
    ) -> None:
        self.index = index
        self._wants_experts = wants_experts
        self.finish_reason: str | None = None
        self.experts: RoutedExperts | None = None
        self._texts = texts
        self._base_model = base_model
        self._passage = Passage(stops)
        self._taken: list[int] = []

    async def take(self, told: TokensDrawn) -> Stretch:
        """Tokens that were told; after a gap, none until the result is there."""
        known = len(self._taken) - told.start
        if known >= 0:
            with suppress(NoResponder, BrokerUnavailable):  # its sampler has died: a gap
                await self._add(told, known)
        return self._passage.release()

    async def finish(self, sequence: Sequence) -> Stretch:
        """The rest.

        Raises:
            ServerError: other tokens were told than are in the result, or it lacks its experts.
        """
        if self._wants_experts and sequence.routed_experts is None:
            raise ServerError(
                "return_routed_experts: the answer does not tell where its tokens were sent; send "
                "the request again"
            )
        tokens = np.frombuffer(sequence.tokens, dtype="<i4").tolist()
        if tokens[: len(self._taken)] != self._taken:
            raise ServerError(
                "the answer was drawn again on another kind of sampler while it was streamed; "
                "send the request again"
            )
        await self._add(sequence, len(self._taken), patience_s=PATIENCE_S)
        self.finish_reason, self.experts = sequence.stop_reason, sequence.routed_experts
        return self._passage.release(is_end=True)

    async def _add(
        self, drawn: TokensDrawn | Sequence, known: int, *, patience_s: float = 0.0
    ) -> None:
        tokens = np.frombuffer(drawn.tokens, dtype="<i4").tolist()
        logprobs = np.frombuffer(drawn.logprobs, dtype="<f4").tolist()
        tops = _tops(drawn.topk, len(tokens))
        heard = {*tokens[known:], *(token for top in tops[known:] for token, _ in top)}
        pieces = await self._texts.spell(self._base_model, heard, patience_s=patience_s)
        for place in range(known, len(tokens)):
            top = tuple((pieces[token], logprob) for token, logprob in tops[place])
            self._passage.add(Token(pieces[tokens[place]], logprobs[place], top))
        self._taken += tokens[known:]


def _tops(topk: TopK | None, length: int) -> list[list[tuple[int, float]]]:
    if topk is None:
        return [[]] * length
    tokens = np.frombuffer(topk.token_ids, dtype="<i4").reshape(length, topk.k).tolist()
    logprobs = np.frombuffer(topk.logprobs, dtype="<f4").reshape(length, topk.k).tolist()
    return [list(zip(*pair, strict=True)) for pair in zip(tokens, logprobs, strict=True)]

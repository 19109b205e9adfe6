"""One HTTP request's answer: its choices, put together whole or chunk by chunk."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from tinsmith.messages.sampling import SampleDone
from tinsmith_gateway.openai.choice import Choice
from tinsmith_gateway.openai.draws import Draws
from tinsmith_gateway.openai.forms import Frame, placed, routed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from tinsmith.messages.sampling import Sample, TokensDrawn
    from tinsmith_gateway.gateway import Gateway
    from tinsmith_gateway.openai.forms import Form, Json
    from tinsmith_gateway.openai.options import Options
    from tinsmith_gateway.openai.passage import Stretch

    IsGone = Callable[[], bool]


class Usage:
    """Tokens: of every prompt once, and of all that was drawn."""

    def __init__(self) -> None:
        self._prompt = self._cached = self._drawn = 0

    def count(self, done: SampleDone) -> None:
        """One prompt's continuations."""
        self._prompt += done.prompt_tokens
        self._cached += done.prompt_cache_hit_tokens
        self._drawn += sum(len(one.tokens) // 4 for one in done.sequences)

    def told(self) -> Json:
        """As clients read it."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._drawn,
            "total_tokens": self._prompt + self._drawn,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


class Answer:
    """``n`` choices for each of the samples, in their order."""

    def __init__(
        self, gateway: Gateway, owner: str, options: Options, samples: list[Sample], form: Form
    ) -> None:
        self._options = options
        self._form = form
        self._has_logprobs = options.top is not None
        self._draws = Draws(gateway, owner, samples)
        self._frame = Frame(form, samples[0].request_id, options.model)
        self._usage = Usage()
        texts, base_model = gateway.openai.texts, samples[0].base_model
        self._choices = [
            Choice(
                index,
                texts,
                base_model,
                options.stops,
                wants_experts=options.return_routed_experts,
            )
            for index in range(options.n * len(samples))
        ]

    async def whole(self, is_gone: IsGone) -> Json:
        """The answer when all of it is there; raises as ``Draws.sent`` and ``follow``."""
        contents = {}
        async with self._draws.sent() as news, aclosing(self._draws.follow(news, is_gone)) as heard:
            async for place, one in heard:
                if isinstance(one, SampleDone):
                    async for choice, stretch in self._finished(place, one):
                        told = self._form.choice(stretch, has_logprobs=self._has_logprobs)
                        contents[choice.index] = told | routed(choice.experts)
        choices = [
            placed(one.index, one.finish_reason, contents[one.index]) for one in self._choices
        ]
        return self._frame.whole(choices, self._usage.told())

    async def chunks(self, is_gone: IsGone) -> AsyncGenerator[Json]:
        """The answer as it is drawn; raises as ``whole``."""
        more = {"usage": None} if self._options.stream_options.include_usage else {}
        opened: set[int] = set()
        async with self._draws.sent() as news, aclosing(self._draws.follow(news, is_gone)) as heard:
            async for place, one in heard:
                async for choice, stretch in self._stretches(place, one):
                    for content in self._contents(choice, stretch, opened):
                        yield self._frame.chunk([content], **more)
        if more:
            yield self._frame.chunk([], usage=self._usage.told())

    def _contents(self, choice: Choice, stretch: Stretch, opened: set[int]) -> list[Json]:
        contents = []
        opening = self._form.opening()
        if choice.index not in opened and opening is not None:
            contents.append(placed(choice.index, None, opening))
        opened.add(choice.index)
        if stretch.text or stretch.tokens or choice.finish_reason:
            delta = self._form.delta(stretch, has_logprobs=self._has_logprobs)
            delta |= routed(choice.experts)  # with the last
            contents.append(placed(choice.index, choice.finish_reason, delta))
        return contents

    async def _stretches(
        self, place: int, heard: TokensDrawn | SampleDone
    ) -> AsyncIterator[tuple[Choice, Stretch]]:
        if isinstance(heard, SampleDone):
            async for finished in self._finished(place, heard):
                yield finished
        else:
            choice = self._choices[place * self._options.n + heard.index]
            yield choice, await choice.take(heard)

    async def _finished(
        self, place: int, done: SampleDone
    ) -> AsyncIterator[tuple[Choice, Stretch]]:
        self._usage.count(done)
        for index, sequence in enumerate(done.sequences):
            choice = self._choices[place * self._options.n + index]
            yield choice, await choice.finish(sequence)

"""The bodies that OpenAI's clients send; what this server does not do is refused, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith_gateway.openai.conversation import conversation
from tinsmith_gateway.wire import requests

if TYPE_CHECKING:
    from tinsmith.messages.texts import ChatMessage

T = TypeVar("T")

Text = Annotated[str, Meta(min_length=1)]
Tokens = list[int]

_DEFAULTS: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Options that this server lacks, and the values with which they change nothing."""
_LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key"})
"""Options that never change an answer."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against who reads along; there is none


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes take; ``top_k`` and ``return_routed_experts`` are extensions."""

    name_of_top: ClassVar[str]

    model: Text
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Text | list[Text] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_routed_experts: bool = False

    @property
    def length(self) -> int | None:
        """The most tokens of an answer; None: what the context has room for."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many alternatives to tell of each token; None: no log-probabilities at all."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def params(self) -> requests.SamplingParams:
        """As the sampling route takes them."""
        return requests.SamplingParams(
            max_tokens=self.length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=list(self.stops) or None,
        )


class Completion(Options, frozen=True, kw_only=True):
    """Continues texts, or tokens."""

    name_of_top = "logprobs"

    prompt: str | list[str | int | Tokens]
    logprobs: int | None = None

    @property
    def length(self) -> int | None:
        """As OpenAI's."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """See ``Options``."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | Tokens]:
        """One or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [part for part in self.prompt if isinstance(part, int)]
        several = [part for part in self.prompt if not isinstance(part, int)]
        if tokens and several:
            raise InvalidRequest("prompt: mixes tokens with texts; send one kind in each request")
        return several or [tokens]


class Chat(Options, frozen=True, kw_only=True):
    """Answers a conversation."""

    name_of_top = "top_logprobs"

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def length(self) -> int | None:
        """By its new name or its old one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        """See ``Options``."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def conversation(self) -> tuple[ChatMessage, ...]:
        """The messages, as templates take them."""
        return conversation(self.messages)


def decode(raw: bytes, type_: type[T]) -> T:
    """``raw`` as ``type_``.

    Raises:
        InvalidRequest: a field is missing or of the wrong kind.
        NotSupported: an option that is not known, or one that this server lacks.
    """
    body = requests.decode(raw, dict[str, Any])
    known = {field.name for field in msgspec.structs.fields(type_)}  # type: ignore[arg-type]
    given = {name: value for name, value in body.items() if value is not None}
    for name in sorted(given.keys() - known):
        _check_no_effect(name, given.pop(name))
    try:
        return msgspec.convert(given, type_)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_named(str(error))) from error


def _check_no_effect(name: str, value: object) -> None:
    if name in _LABELS or value in _DEFAULTS.get(name, ()):
        return
    if name in _DEFAULTS:
        raise NotSupported(f"{name}: not supported by this server; leave it out")
    raise NotSupported(f"{name[:100]}: not an option of this route; leave it out")


def _named(problem: str) -> str:
    """A decoder's message with the field in front, as all of ours have it."""
    what, _, where = problem.partition(" - at `$")
    if where:
        return f"{where.strip('.`')}: {what}"
    missing = problem.partition("required field `")[2].rstrip("`")
    return f"{missing}: missing" if missing else f"request body: {problem}"

"""The objects of the two routes: whole answers, and the chunks of streamed ones."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any, Protocol

from tinsmith import ids
from tinsmith_gateway.openai import logprobs

if TYPE_CHECKING:
    from tinsmith.messages.sampling import RoutedExperts
    from tinsmith_gateway.openai.passage import Stretch

Json = dict[str, Any]


class Form(Protocol):
    """What an answer of one route looks like."""

    prefix: str
    whole: str
    chunk: str

    def choice(self, stretch: Stretch, *, has_logprobs: bool) -> Json:
        """The content of a choice."""

    def delta(self, stretch: Stretch, *, has_logprobs: bool) -> Json:
        """The next content of a choice."""

    def opening(self) -> Json | None:
        """What a streamed choice begins with."""


class ChatForm:
    """``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, stretch: Stretch, *, has_logprobs: bool) -> Json:
        """A message."""
        message = {"role": "assistant", "content": stretch.text, "refusal": None}
        return {"message": message, "logprobs": _chat_logprobs(stretch, has_logprobs)}

    def delta(self, stretch: Stretch, *, has_logprobs: bool) -> Json:
        """More of a message."""
        delta = {"content": stretch.text} if stretch.text else {}
        return {"delta": delta, "logprobs": _chat_logprobs(stretch, has_logprobs)}

    def opening(self) -> Json | None:
        """Whose message it is."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}


class CompletionForm:
    """``/v1/completions``."""

    prefix = "cmpl-"
    whole = chunk = "text_completion"

    def choice(self, stretch: Stretch, *, has_logprobs: bool) -> Json:
        """A text."""
        scores = logprobs.of_completion(stretch) if has_logprobs else None
        return {"text": stretch.text, "logprobs": scores}

    delta = choice

    def opening(self) -> Json | None:
        """Nothing."""
        return None


class Frame:
    """What all objects of one answer have in common."""

    def __init__(self, form: Form, request_id: str, model: str) -> None:
        self.form = form
        self._common = {
            "id": form.prefix + ids.token(request_id),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[Json], usage: Json) -> Json:
        """A whole answer."""
        return {**self._common, "object": self.form.whole, "choices": choices, "usage": usage}

    def chunk(self, choices: list[Json], **usage: Json | None) -> Json:
        """A part of a streamed one."""
        return {**self._common, "object": self.form.chunk, "choices": choices, **usage}


def placed(index: int, finish_reason: str | None, content: Json) -> Json:
    """A choice in its place."""
    return {"index": index, **content, "finish_reason": finish_reason}


def routed(experts: RoutedExperts | None) -> Json:
    """What a finished choice has beside its content when it was asked for."""
    if experts is None:
        return {}
    told = {
        "data": base64.b64encode(experts.experts).decode(),  # little-endian, row-major
        "dtype": f"uint{8 * experts.width}",
        "shape": [experts.length, experts.layers, experts.k],
    }
    return {"routed_experts": told}


def _chat_logprobs(stretch: Stretch, has_logprobs: bool) -> Json | None:  # noqa: FBT001
    return logprobs.of_chat(stretch) if has_logprobs and stretch.tokens else None

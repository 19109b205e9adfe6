"""Text and tokens: asked of the samplers, since they have the tokenizer and its chat template."""

from __future__ import annotations

from typing import Literal

import msgspec

from tinsmith.messages.base import Message


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class TokenizeText(Message, frozen=True, kw_only=True):
    """Text as the beginning of a prompt, with the tokens that the tokenizer puts before it."""

    text: str


class RenderChat(Message, frozen=True, kw_only=True):
    """A conversation by the model's own chat template, up to where its answer begins."""

    messages: tuple[ChatMessage, ...]


class PromptRendered(Message, frozen=True, kw_only=True):
    """A prompt."""

    tokens: bytes  # int32 [n]


class TokenPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one token adds to a text: not always whole characters.

    ``array_like``: the field order is the wire format; only ever append fields.
    """

    text: bytes  # UTF-8, or a part of a character
    is_special: bool  # a mark of the model's own, which is no part of the text


class SpellTokens(Message, frozen=True, kw_only=True):
    """Asks what some tokens stand for."""

    tokens: bytes  # int32 [n]


class TokensSpelled(Message, frozen=True, kw_only=True):
    """One piece for each token; one that the tokenizer does not know is empty."""

    pieces: tuple[TokenPiece, ...]

"""Chat messages as clients send them, and as the chat templates of models take them."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith.messages.texts import ChatMessage

_ROLES: tuple[str, ...] = get_args(get_type_hints(ChatMessage)["role"])


def conversation(messages: list[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    """Texts only; InvalidRequest or NotSupported name the message and its field."""
    if not messages:
        raise InvalidRequest("messages: is empty; send at least one")
    return tuple(_message(one, f"messages[{place}]") for place, one in enumerate(messages))


def _message(message: dict[str, Any], where: str) -> ChatMessage:
    for name in sorted(message.keys() - {"role", "content"}):
        if message[name] is not None and message[name] != []:  # as in an answer that is sent back
            raise NotSupported(f"{where}.{name[:100]}: not supported by this server; leave it out")
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role: {str(role)[:100]!r} is not supported; use one of {', '.join(_ROLES)}"
        )
    return ChatMessage(role=role, content=_content(message.get("content"), f"{where}.content"))


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: neither a text nor a list of parts")
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part, dict):
        raise NotSupported(f"{where}.type: {str(kind)[:100]!r} is not supported; send text")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text: not a text")
    return text

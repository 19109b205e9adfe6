"""Log-probabilities of tokens in the two forms of OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinsmith.messages.texts import TokenPiece
    from tinsmith_gateway.openai.passage import Stretch

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def of_chat(stretch: Stretch) -> dict[str, Any]:
    """A token's bytes are exact; its text has a mark for what is no whole character."""
    content = [
        {
            **_entry(token.piece, token.logprob),
            "top_logprobs": [_entry(piece, logprob) for piece, logprob in token.top],
        }
        for _, token in stretch.tokens
    ]
    return {"content": content, "refusal": None}


def of_completion(stretch: Stretch) -> dict[str, Any]:
    """``text_offset`` counts characters from the beginning of the continuation."""
    tokens = [token for _, token in stretch.tokens]
    return {
        "tokens": [_name(token.piece) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {_name(piece): _finite(logprob) for piece, logprob in token.top} for token in tokens
        ],
        "text_offset": [offset for offset, _ in stretch.tokens],
    }


def _entry(piece: TokenPiece, logprob: float) -> dict[str, Any]:
    return {
        "token": piece.text.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(piece.text),
    }


def _name(piece: TokenPiece) -> str:
    """As OpenAI's: what is no whole character is written byte by byte."""
    try:
        return piece.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.text)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)

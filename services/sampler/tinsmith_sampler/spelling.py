"""What each token adds to a text, as bytes.

Tokenizers only decode whole texts, into characters: of a token that holds a part of one they make
a replacement mark, and of the first token of a text some cut the space. Here a token is what it
adds to the text before it, so that the bytes of tokens, one after the other, are their text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tinsmith.messages.texts import TokenPiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN_RE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes.

    As in GPT-2's ``bytes_to_unicode``: printable Latin-1 stands for itself, the others follow
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()
_NOTHING = TokenPiece(b"", is_special=False)


class Spelling:
    """The pieces of one tokenizer: byte-level ones, and those of SentencePiece's kind."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        self._special = {i for i, token in self._added.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        self._is_byte_level = _is_byte_level(tokenizer)

    def piece(self, token: int) -> TokenPiece:
        """The piece of any number; that of one that stands for no token is empty."""
        if not 0 <= token < len(self._tokenizer):
            return _NOTHING
        written = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(written, str):
            return _NOTHING
        if token in self._special:
            return TokenPiece(written.encode(), is_special=True)
        text = written.encode() if token in self._added else self._bytes(written)
        return TokenPiece(text, is_special=False)

    def _bytes(self, written: str) -> bytes:
        if self._is_byte_level:
            is_known = all(character in _BYTES for character in written)
            return bytes(map(_BYTES.__getitem__, written)) if is_known else written.encode()
        if (found := _BYTE_TOKEN_RE.fullmatch(written)) is not None:
            return bytes([int(found[1], 16)])
        return written.replace(_SPACE, " ").encode()


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str())["decoder"] or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)

"""The text of a continuation: the same however it is cut, whole characters, without its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.messages.texts import TokenPiece
from tinsmith_gateway.openai.passage import Passage, Token

TEXTS = st.text(st.sampled_from("ab\u00e9\u20ac\U0001f600"), max_size=30)


def token(text, *, is_special=False):
    return Token(TokenPiece(text, is_special), -1.0)


def cut(data, lengths):
    """``data`` in pieces of these lengths, and the rest of it."""
    pieces = []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    return [piece for piece in (*pieces, data) if piece]


def read(pieces, stops=(), *, live):
    """The parts that are given out; with ``live`` after every token."""
    passage, parts = Passage(stops), []
    for piece in pieces:
        passage.add(token(piece))
        if live:
            parts.append(passage.release())
    return [*parts, passage.release(is_end=True)]


@given(TEXTS, st.lists(st.integers(1, 5)))
def test_a_live_text_is_the_whole_one_and_has_whole_characters(text, lengths):
    parts = [part.text for part in read(cut(text.encode(), lengths), live=True)]

    assert "".join(parts) == text


@given(st.binary(max_size=20), st.lists(st.integers(1, 5)))
def test_bytes_that_are_no_text_are_marked_alike_live_and_whole(data, lengths):
    pieces = cut(data, lengths)
    live = "".join(part.text for part in read(pieces, live=True))

    assert live == data.decode(errors="replace")
    assert live == "".join(part.text for part in read(pieces, live=False))


@given(TEXTS, st.lists(st.integers(1, 5)), st.sampled_from(["ab", "aba", "\u00e9\u20ac", "b"]))
def test_nothing_of_a_stop_string_is_given_out(text, lengths, stop):
    parts = read(cut(text.encode(), lengths), (stop,), live=True)

    assert "".join(part.text for part in parts) == text.partition(stop)[0]


@given(TEXTS, st.lists(st.integers(1, 5)), st.sampled_from([(), ("ab",), ("b", "\u20aca")]))
def test_every_token_that_begins_in_the_text_is_told_once(text, lengths, stops):
    live = read(cut(text.encode(), lengths), stops, live=True)
    whole = read(cut(text.encode(), lengths), stops, live=False)
    shown = "".join(part.text for part in live)

    assert [one for part in live for one in part.tokens] == whole[-1].tokens
    assert all(offset < len(shown) for offset, _ in whole[-1].tokens)


def test_the_mark_at_the_end_is_neither_text_nor_told():
    passage = Passage()
    for one in (token(b"Hi"), token(b"<|mid|>", is_special=True), token(b"!")):
        passage.add(one)
    passage.add(token(b"<|end|>", is_special=True))
    told = passage.release(is_end=True)

    assert told.text == "Hi!"
    assert [one.piece.text for _, one in told.tokens] == [b"Hi", b"<|mid|>", b"!"]


@pytest.mark.parametrize("text", ["aab", "aaab"])
def test_a_stop_string_is_found_wherever_it_begins(text):
    parts = read([byte.encode() for byte in text], ("aab",), live=True)

    assert "".join(part.text for part in parts) == text[: text.index("aab")]

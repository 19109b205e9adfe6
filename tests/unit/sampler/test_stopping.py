"""The end of a row: stop strings over a real byte-level tokenizer, stop tokens, the limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tinsmith_sampler.stopping import Stopper, StopText


@pytest.fixture(scope="module")
def tokenizer(models):
    return AutoTokenizer.from_pretrained(models["llama"])


def text_of_row(tokenizer, text: str, *stops: str, ids: list[int] | None = None) -> str | None:
    """What a row that goes on to say ``text`` has said when it ends; None if nothing ends it."""
    watch = StopText(stops, tokenizer.decode)
    ids = tokenizer.encode(text) if ids is None else ids
    for count, token in enumerate(ids, 1):
        if watch.ends_with(token):
            return tokenizer.decode(ids[:count])
    return None


def bytewise(tokenizer, text: str) -> list[int]:
    """One token for each byte of UTF-8, as no tokenizer would choose by itself."""
    return [token for char in text for token in _bytes_of(tokenizer, char)]


def _bytes_of(tokenizer, char: str) -> list[int]:
    ids = tokenizer.encode(char)
    assert len(ids) == len(char.encode())
    return ids


def test_a_string_within_one_token_ends_the_row(tokenizer):
    assert text_of_row(tokenizer, "a b. c d", ".") == "a b."


def test_a_string_that_spans_tokens_ends_the_row_once_and_at_its_end(tokenizer):
    stop = "qzx#jj"
    assert len(tokenizer.encode(stop)) > 3

    said = text_of_row(tokenizer, f"abc {stop} {stop} def", stop)

    assert said.endswith(stop)
    assert said.count(stop) == 1


def test_a_string_is_found_byte_by_byte_through_an_unfinished_character(tokenizer):
    ids = bytewise(tokenizer, "xé→😀y")

    assert text_of_row(tokenizer, "", "→😀", ids=ids) == "xé→😀"


def test_a_string_is_found_however_late_and_however_the_tokens_fall(tokenizer):
    ids = bytewise(tokenizer, "ab" * 300 + "STOP" + "ab")

    assert text_of_row(tokenizer, "", "STOP", ids=ids) == "ab" * 300 + "STOP"


def test_the_first_of_several_strings_ends_the_row(tokenizer):
    ids = bytewise(tokenizer, "one two three")

    assert text_of_row(tokenizer, "", "three", "tw", "zzz", ids=ids) == "one tw"


def test_a_string_that_begins_anew_inside_itself_is_found(tokenizer):
    ids = bytewise(tokenizer, "aaabaaab!")

    assert text_of_row(tokenizer, "", "aab!", ids=ids) == "aaabaaab!"


def test_a_special_token_can_be_a_stop_string(tokenizer):
    assert text_of_row(tokenizer, "hi<|im_end|>more", "<|im_end|>") == "hi<|im_end|>"


def test_a_string_that_is_not_there_ends_nothing(tokenizer):
    assert text_of_row(tokenizer, "the quick brown fox", "dog") is None


def test_text_before_the_row_does_not_count(tokenizer):
    """The prompt's last characters and the row's first must not make up a stop string."""
    assert text_of_row(tokenizer, "OP and on", "STOP") is None


def stopper(**fields) -> Stopper:
    return Stopper(**{"max_tokens": 3, "stop_tokens": frozenset(), "text": None, **fields})


def test_the_last_token_allowed_ends_a_row_for_its_length():
    row = stopper()

    assert [row.after(token) for token in (5, 6, 7)] == [None, None, "length"]


def test_a_stop_token_ends_a_row():
    row = stopper(stop_tokens=frozenset({6}))

    assert [row.after(token) for token in (5, 6)] == [None, "stop"]


def test_a_stop_on_the_last_token_allowed_is_a_stop():
    assert stopper(max_tokens=1, stop_tokens=frozenset({6})).after(6) == "stop"


def test_a_stop_string_on_the_last_token_allowed_is_a_stop(tokenizer):
    [token] = tokenizer.encode(".")
    row = stopper(max_tokens=1, text=StopText(["."], tokenizer.decode))

    assert row.after(token) == "stop"


@pytest.fixture(scope="module")
def spaced():
    """A tokenizer whose decoder drops the space before a text's first word."""
    words = ["<unk>", "▁the", "▁cat", "▁", "s", "at", "▁on", ".", "t"]
    made = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, "<unk>"))
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def first_end(decode, ids: list[int], stops: list[str]) -> int | None:
    """Where the text as a whole first has one of the strings in it."""
    for count in range(1, len(ids) + 1):
        if any(stop in decode(ids[:count]) for stop in stops):
            return count
    return None


def watched_end(decode, ids: list[int], stops: list[str]) -> int | None:
    watch = StopText(stops, decode)
    return next((count for count, token in enumerate(ids, 1) if watch.ends_with(token)), None)


def pick_stops(data, text: str) -> list[str]:
    """Strings from the text, finished characters only, and one that may not be there."""
    clean = text.replace("\N{REPLACEMENT CHARACTER}", "")
    start = data.draw(st.integers(0, max(0, len(clean) - 1)))
    found = clean[start : start + data.draw(st.integers(1, 12))]
    return [stop for stop in (found, data.draw(st.text("aet .q", max_size=3))) if stop] or ["a"]


@given(ids=st.lists(st.integers(0, 447), min_size=1, max_size=40), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_tokens_of_bytes_end_where_the_whole_text_has_the_string(tokenizer, ids, data):
    """Random tokens: half characters and bytes that are no text at all among them."""
    stops = pick_stops(data, tokenizer.decode(ids))

    assert watched_end(tokenizer.decode, ids, stops) == first_end(tokenizer.decode, ids, stops)


@given(ids=st.lists(st.integers(1, 8), min_size=1, max_size=30), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_decoder_that_drops_the_first_space_ends_rows_at_the_same_place(spaced, ids, data):
    stops = pick_stops(data, spaced.decode(ids))

    assert watched_end(spaced.decode, ids, stops) == first_end(spaced.decode, ids, stops)

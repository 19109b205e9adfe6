"""What tokens add to a text: exact bytes, for byte-level tokenizers and SentencePiece's kind."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tinsmith.testing import tiny_model
from tinsmith_sampler.spelling import Spelling

TEXTS = ["The sea is vast", " two  spaces", "na\u00efve \u20ac5 \U0001f600\n", "user\nHello!"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_model.build(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def with_byte_fallback():
    """As Llama 2, Mistral and Gemma have it: a mark for a space, bytes for what is unknown."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", *"Thesiavtwopc", "\u2581t", "he"]
    bpe = Tokenizer(
        models.BPE(
            vocab={word: place for place, word in enumerate(words)},
            merges=[("\u2581", "t"), ("h", "e")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    bpe.normalizer = normalizers.Replace(" ", "\u2581")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "with_byte_fallback"])
def test_the_bytes_of_tokens_are_their_text(request, kind, text):
    """The space at a text's beginning, which some decoders cut off, included."""
    tokenizer = request.getfixturevalue(kind)
    spelling = Spelling(tokenizer)
    pieces = map(spelling.piece, tokenizer.encode(text, add_special_tokens=False))

    assert b"".join(piece.text for piece in pieces) == text.encode()


def test_a_token_can_be_a_part_of_a_character(byte_level):
    (first, *_), spelling = byte_level.encode("\U0001f600"), Spelling(byte_level)

    assert "\U0001f600".encode().startswith(spelling.piece(first).text)


def test_marks_are_told_from_text(byte_level):
    pieces = [Spelling(byte_level).piece(token) for token in (1, 5)]

    assert [piece.is_special for piece in pieces] == [True, False]
    assert pieces[0].text == tiny_model.SPECIAL_TOKENS[1].encode()


@pytest.mark.parametrize("number", [-1, 10**6])
def test_a_number_that_is_no_token_spells_nothing(byte_level, number):
    assert Spelling(byte_level).piece(number).text == b""

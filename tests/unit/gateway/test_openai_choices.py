"""A continuation whose tokens are told live: twice, late, not at all, or wrongly."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith.errors import BrokerUnavailable, ServerError
from tinsmith.messages.sampling import Sequence, TokensDrawn
from tinsmith.messages.texts import TokenPiece
from tinsmith_gateway.openai.choice import Choice

WORD = b"hello, world"


class Letters:
    """Token n is the letter with this number; without patience nobody is there if it says so."""

    is_dead = False

    async def spell(self, base_model, tokens, *, patience_s):
        if self.is_dead and not patience_s:
            raise BrokerUnavailable("no answer")
        return {token: TokenPiece(bytes([token]), is_special=False) for token in tokens}


def arrays(word):
    return {
        "tokens": np.frombuffer(word, dtype=np.uint8).astype("<i4").tobytes(),
        "logprobs": np.full(len(word), -1, dtype="<f4").tobytes(),
    }


def told(start, end):
    return TokensDrawn(request_id="r", index=0, start=start, **arrays(WORD[start:end]))


@pytest.fixture
def choice():
    return Choice(0, Letters(), "tiny", ())


@pytest.mark.parametrize(
    "heard",
    [
        [],
        [(0, 3), (3, 5)],
        [(0, 3), (0, 3), (1, 5)],
        [(0, 3), (4, 5), (5, 6)],
        [(0, 3), (4, 5), (0, 1), (1, 2), (2, 6)],
        [(2, 4)],
    ],
    ids=["nothing", "in order", "twice", "a gap", "a gap and drawn again", "no beginning"],
)
async def test_the_text_is_whole_whatever_was_heard(choice, heard):
    parts = [(await choice.take(told(*span))).text for span in heard]
    parts.append((await choice.finish(Sequence(stop_reason="length", **arrays(WORD)))).text)

    assert "".join(parts) == WORD.decode()
    assert choice.finish_reason == "length"


async def test_what_is_heard_in_order_is_given_out_at_once(choice):
    assert (await choice.take(told(0, 5))).text == "hello"
    assert (await choice.take(told(5, 7))).text == ", "


async def test_a_sampler_that_died_delays_the_text(choice):
    await choice.take(told(0, 5))
    choice._texts.is_dead = True

    assert (await choice.take(told(5, 7))).text == ""
    rest = await choice.finish(Sequence(stop_reason="stop", **arrays(WORD)))
    assert rest.text == ", world"


async def test_another_answer_than_was_told_is_an_error(choice):
    await choice.take(told(0, 5))

    with pytest.raises(ServerError, match="drawn again"):
        await choice.finish(Sequence(stop_reason="stop", **arrays(b"help")))

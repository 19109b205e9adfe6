"""A continuation whose tokens are told live: twice, late, not at all, or wrongly."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tinsmith.errors import BrokerUnavailable, ServerError, TooLarge
from tinsmith.messages.sampling import RoutedExperts, Sequence, TokensDrawn
from tinsmith.messages.texts import TokenPiece
from tinsmith_gateway.openai.choice import Choice
from tinsmith_gateway.openai.forms import routed
from tinsmith_gateway.openai.samples import _check_routed

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


async def test_a_finished_choice_tells_where_its_tokens_were_sent(choice):
    sent = np.arange(12, dtype="<u2").reshape(3, 2, 2)
    experts = RoutedExperts(experts=sent.tobytes(), width=2, length=3, layers=2, k=2)
    await choice.finish(Sequence(stop_reason="length", routed_experts=experts, **arrays(WORD)))

    told = routed(choice.experts)["routed_experts"]
    assert (told["dtype"], told["shape"]) == ("uint16", [3, 2, 2])
    back = np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])
    np.testing.assert_array_equal(back, sent)
    assert routed(None) == {}


async def test_an_answer_that_lacks_what_was_asked_for_is_an_error():
    choice = Choice(0, Letters(), "tiny", (), wants_experts=True)
    with pytest.raises(ServerError, match="return_routed_experts: the answer does not tell"):
        await choice.finish(Sequence(stop_reason="length", **arrays(WORD)))


def test_prompts_that_are_told_with_too_many_continuations_are_refused():
    _check_routed([[1, 2], [3]], 5, 15)
    with pytest.raises(
        TooLarge, match=r"return_routed_experts: .* 5 .* are 15, over .* 14; lower n"
    ):
        _check_routed([[1, 2], [3]], 5, 14)


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

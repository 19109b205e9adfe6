"""Which continuations are scored again."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith import ids
from tinsmith.messages import sampling
from tinsmith.messages.base import BlobRef, Failed
from tinsmith_sampler.picking import MAX_TOKENS, PER_MINUTE, Allowance, Picker, is_picked

PROMPT = np.arange(5, dtype="<i4").tobytes()
TOKENS, LOGPROBS = np.arange(3, dtype="<i4").tobytes(), np.full(3, -1.5, "<f4").tobytes()
REF = BlobRef("0" * 64, 1)


class Heard:
    """A bus that remembers what was told to whom."""

    def __init__(self):
        self.events = []

    async def emit(self, _, message, **tokens):
        self.events.append((tokens["pool"], message))


def request(adapter=None, prompt=PROMPT):
    return sampling.Sample(
        request_id="s:sample:0:4", sampler_id="s:sample:0", seq=4, base_model="tiny",
        adapter=adapter, prompt=prompt,
    )  # fmt: skip


def answer(count=2, digest="d"):
    one = sampling.Sequence(tokens=TOKENS, logprobs=LOGPROBS, stop_reason="length")
    return sampling.SampleDone(
        request_id="s:sample:0:4", sequences=(one,) * count, request_blake3=digest
    )


async def picked(result, share=1.0, asked=None):
    heard = Heard()
    await Picker(heard, "tiny", share).pick(asked or request(), "d", result)
    return heard.events


def adapter(*files):
    return sampling.AdapterRef(version="v", files=dict.fromkeys(files, REF), model_id="m")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_about_the_share_is_picked(share):
    count = sum(is_picked(f"s:sample:0:{n}", 0, share) for n in range(20_000))

    # Four standard deviations: ids are fixed, so this cannot fail by chance.
    assert abs(count - 20_000 * share) < 4 * (20_000 * share * (1 - share)) ** 0.5


def test_a_larger_share_picks_all_that_a_smaller_one_picks():
    small = {n for n in range(5000) if is_picked("r", n, 0.01)}

    assert small
    assert small < {n for n in range(5000) if is_picked("r", n, 0.1)}


def test_a_share_of_one_picks_all_and_of_zero_none():
    assert all(is_picked("r", n, 1.0) for n in range(1000))
    assert not any(is_picked("r", n, 0.0) for n in range(1000))


async def test_a_request_that_is_answered_again_picks_the_same():
    first, again = await picked(answer(300), 0.05), await picked(answer(300), 0.05)

    assert 1 < len(first) < 30
    assert [one.index for _, one in first] == [one.index for _, one in again]


async def test_what_is_told_is_the_whole_text_and_the_numbers_of_what_was_drawn():
    (pool, one), *_ = await picked(answer())

    assert (pool, one.tokens, one.logprobs) == (ids.pool_token("tiny"), PROMPT + TOKENS, LOGPROBS)


@pytest.mark.parametrize(
    ("files", "model"), [("adapter_model.safetensors", "tiny"), ("config.json", "tiny:full")]
)
async def test_those_who_train_the_weights_are_told(files, model):
    (pool, one), *_ = await picked(answer(), asked=request(adapter(files)))

    assert (pool, one.adapter.model_id) == (ids.pool_token(model), "m")


async def test_failures_answers_to_others_and_very_long_texts_are_not_told():
    failure = Failed(category="user", message="no")
    failed = sampling.SampleFailed(request_id="s:sample:0:4", failure=failure)
    long = request(prompt=np.zeros(MAX_TOKENS, "<i4").tobytes())

    assert await picked(failed) == []
    assert await picked(answer(digest="another")) == []
    assert await picked(answer(), asked=long) == []


async def test_no_more_are_told_than_are_allowed():
    assert len(await picked(answer(PER_MINUTE + 10))) == PER_MINUTE


def test_an_allowance_is_for_a_minute_and_nothing_is_saved_up():
    now = [0.0]
    allowance = Allowance(2, clock=lambda: now[0])
    first = [allowance.take() for _ in range(3)]
    now[0] = 600.0

    assert first == [True, True, False]
    assert [allowance.take() for _ in range(3)] == [True, True, False]

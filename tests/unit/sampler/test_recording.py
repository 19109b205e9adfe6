"""What is logged of an answered request."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3
from tests.unit.sampler.examples import prompt, sample
from tests.unit.sampler.logged import MODEL, SAMPLER, SESSION

from tinsmith.messages.base import decoder, encode
from tinsmith.messages.sampling import (
    AdapterRef,
    RoutedExperts,
    SampleContent,
    SampleDone,
    Sequence,
)
from tinsmith.sealing import PLAIN, KeySeal
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.recording import record, run_of
from tinsmith_sampler.rows import request_seed

ADAPTER = AdapterRef(version="v", files={}, model_id=MODEL)
TOKENS, LOGPROBS = b"\1\0\0\0\2\0\0\0", b"\0\0\0\x80\0\0\0\0"
DONE = SampleDone(
    request_id="r1",
    sequences=(Sequence(tokens=TOKENS, logprobs=LOGPROBS, stop_reason="stop"),),
    prompt_logprobs=b"\0\0\0\0",
    plane="torch/cpu/float32",
    sampler="sampler-1",
    environment={"torch": "2"},
)


def request(**fields):
    params = {"stop_strings": ("secret",), "temperature": 0.5}
    return sample(sampler_id=SAMPLER, prompt=prompt(5), params=params, **fields)


def digest(data):
    return blake3(data).hexdigest()


def test_digests_prove_a_copy_of_prompt_and_answer():
    made = record(request(), DONE, PLAIN, has_content=False)

    assert made.digests.prompt == digest(prompt(5).tobytes())
    (sequence,) = made.digests.sequences
    assert (sequence.length, sequence.stop_reason) == (2, "stop")
    assert (sequence.tokens, sequence.logprobs) == (digest(TOKENS), digest(LOGPROBS))
    assert made.digests.prompt_logprobs == digest(b"\0\0\0\0")


def test_where_tokens_were_sent_is_not_kept():
    """It follows from what is, and is larger than it."""
    sent = RoutedExperts(experts=b"\1", width=1, length=1, layers=1, k=1)
    (one,) = DONE.sequences
    routed = (msgspec.structs.replace(one, routed_experts=sent),)
    done = msgspec.structs.replace(DONE, sequences=routed)
    made = record(request(routed_experts=True), done, PLAIN, has_content=True)

    assert made == record(request(routed_experts=True), DONE, PLAIN, has_content=True)
    assert made.request.routed_experts


@pytest.mark.parametrize("has_content", [True, False])
def test_settings_are_kept_with_the_seed_that_was_drawn_with(has_content):
    asked = request(num_samples=3)
    made = record(asked, DONE, PLAIN, has_content=has_content)

    assert made.request.num_samples == 3
    assert made.request.params.temperature == 0.5
    assert made.request.params.seed == request_seed(asked)
    assert (made.plane, made.sampler, made.environment) == (
        "torch/cpu/float32", "sampler-1", {"torch": "2"},
    )  # fmt: skip


def test_only_the_policy_full_keeps_what_was_said():
    asked = request()
    without, with_ = (record(asked, DONE, PLAIN, has_content=has) for has in (False, True))

    assert b"secret" not in encode(without)
    assert asked.prompt not in encode(without)
    content = decoder(SampleContent).decode(with_.content)
    assert (content.prompt, content.stop_strings) == (asked.prompt, ("secret",))
    assert content.sequences == DONE.sequences


def test_sealed_content_and_digests_need_the_key():
    seal = KeySeal(KeySeal.new_key())
    made = record(request(), DONE, seal, has_content=True)

    assert b"secret" not in encode(made)
    assert made.digests.prompt != digest(prompt(5).tobytes())
    assert decoder(SampleContent).decode(seal.open(made.content)).sequences == DONE.sequences
    assert made.sealed == seal.scheme


def test_samples_belong_to_the_run_of_their_weights_or_else_to_their_session():
    assert run_of(request(adapter=ADAPTER)) == MODEL
    assert run_of(request()) == SESSION
    assert run_of(request(adapter=AdapterRef(version="old", files={}))) == SESSION


def test_a_record_travels():
    made = record(request(adapter=ADAPTER), DONE, PLAIN, has_content=True)

    assert decoder(type(made)).decode(encode(made)) == made


def test_the_policy_is_checked():
    assert SamplerConfig().log == "digest"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"log": "all"}, SamplerConfig)

"""Logged samples are drawn again; the first that differs is named with its place."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.unit.sampler.examples import prompt
from tests.unit.sampler.logged import MODEL, SAMPLER, Logged

from tinsmith.cli.replay import Options
from tinsmith.config import Config, ModelConfig
from tinsmith.errors import (
    BlobMissing,
    Forgotten,
    InvalidRequest,
    NotFound,
    SealBroken,
    ServerError,
)
from tinsmith.sealing import PLAIN, ClosedSeal, KeySeal
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.replay import replay
from tinsmith_sampler.replaying import Choice


@pytest.fixture
def config(models):
    settings = SamplerConfig(cache_tokens=4096)
    return Config(
        models=(ModelConfig(name="tiny", path=str(models["llama"])),), sections=(settings,)
    )


@pytest.fixture
async def logged(engine, adapters):
    """Three samples under an adapter and one of the base model, of many kinds."""
    logged = Logged()
    adapter = logged.adapter(adapters["a"])
    await logged.draw(engine, 0, adapter=adapter, num_samples=3)
    await logged.draw(engine, 1, adapter=adapter, params={"stop_strings": ("e",)})
    await logged.draw(engine, 2, adapter=adapter, prompt_logprobs=True, topk_sample_logprobs=2)
    to_the_end = {"temperature": 0.0, "max_tokens": None}
    await logged.draw(engine, 3, adapter=adapter, params=to_the_end, prompt=prompt(2030))
    return logged


@pytest.fixture
def replayed(config):
    async def run(logged, **options):
        return await replay(MODEL, logged, Options(target="", **options), config)

    return run


async def test_what_a_sampler_logged_is_drawn_again_bit_for_bit(logged, replayed):
    summary = await replayed(logged)

    assert summary.verdict == "equal"
    assert (summary.samples_compared, summary.sequences_compared) == (4, 6)
    assert summary.warnings == ()


async def test_base_samples_are_drawn_again_without_weights(engine, replayed):
    logged = Logged()
    await logged.draw(engine, 0, num_samples=2)

    assert (await replayed(logged)).verdict == "equal"


def with_token(content, index, position, token):
    sequences = list(content.sequences)
    tokens = np.frombuffer(sequences[index].tokens, "<i4").copy()
    tokens[position] = token
    sequences[index] = msgspec.structs.replace(sequences[index], tokens=tokens.tobytes())
    return msgspec.structs.replace(content, sequences=tuple(sequences))


async def test_a_token_that_was_changed_is_named(logged, replayed):
    logged.tamper(0, lambda content: with_token(content, 2, 4, 7))
    summary = await replayed(logged)

    assert summary.verdict == "diverged"
    assert summary.divergence.request_id == f"{SAMPLER}:0"
    assert summary.divergence.field == "sequences[2].tokens[4]"
    assert summary.divergence.expected == "7"


async def test_a_logprob_that_was_changed_in_one_bit_is_named(logged, replayed):
    def change(content):
        (sequence,) = content.sequences
        data = bytearray(sequence.logprobs)
        data[8] ^= 1
        changed = msgspec.structs.replace(sequence, logprobs=bytes(data))
        return msgspec.structs.replace(content, sequences=(changed,))

    logged.tamper(2, change)
    summary, near = await replayed(logged), await replayed(logged, tolerance=1e-3)

    assert summary.divergence.field == "sequences[0].logprobs[2]"
    # It is near enough, but not what the digest says.
    assert near.divergence.field == "digests.sequences[0].logprobs"


async def test_a_prompt_that_was_changed_is_told_from_an_answer_that_was(logged, replayed):
    logged.tamper(
        1, lambda content: msgspec.structs.replace(content, prompt=prompt(9, 77).tobytes())
    )

    assert (await replayed(logged)).divergence.field == "digests.prompt"


async def test_a_digest_that_was_changed_is_named(logged, replayed):
    digests = logged.records[0].digests
    forged = msgspec.structs.replace(digests.sequences[1], logprobs="00")
    sequences = (digests.sequences[0], forged, digests.sequences[2])
    digests = msgspec.structs.replace(digests, sequences=sequences)
    logged.records[0] = msgspec.structs.replace(logged.records[0], digests=digests)

    assert (await replayed(logged)).divergence.field == "digests.sequences[1].logprobs"


async def test_weights_under_another_name_are_named(logged, replayed):
    request = logged.records[0].request
    adapter = msgspec.structs.replace(request.adapter, version="v0")
    request = msgspec.structs.replace(request, adapter=adapter)
    logged.records[0] = msgspec.structs.replace(logged.records[0], request=request)

    assert (await replayed(logged)).divergence.field == "adapter.version"


async def test_a_request_that_could_not_have_been_answered_is_a_difference(logged, replayed):
    request = msgspec.structs.replace(logged.records[0].request, num_samples=10**9)
    logged.records[0] = msgspec.structs.replace(logged.records[0], request=request)
    divergence = (await replayed(logged)).divergence

    assert (divergence.field, "num_samples" in divergence.found) == ("answer", True)


async def test_weights_that_are_gone_are_no_difference(logged, replayed):
    logged.blobs.clear()

    with pytest.raises(BlobMissing):
        await replayed(logged)


async def test_samples_with_digests_only_are_said_to_be_so(engine, replayed):
    logged = Logged()
    await logged.draw(engine, 0, has_content=False)

    with pytest.raises(InvalidRequest, match=r"by their digests only.*sampler\.log"):
        await replayed(logged)


async def test_beside_others_samples_with_digests_only_are_counted(logged, engine, replayed):
    await logged.draw(engine, 9, has_content=False)
    summary = await replayed(logged)

    assert (summary.verdict, summary.samples_compared, summary.samples_digest_only) == (
        "equal", 4, 1,
    )  # fmt: skip


async def test_nothing_logged_is_not_equal(replayed):
    with pytest.raises(NotFound, match="none of"):
        await replayed(Logged())


async def test_a_share_is_the_same_for_one_seed(logged, replayed):
    chosen = {
        seed: tuple([Choice(0.5, seed).has(one) async for one in logged.stored(MODEL)])
        for seed in range(12)
    }
    seed = next(seed for seed, has in chosen.items() if 0 < sum(has) < 4)
    summary = await replayed(logged, share=0.5, seed=seed)

    assert len(set(chosen.values())) > 1
    assert summary.samples_compared == sum(chosen[seed])
    assert summary.samples_compared + summary.samples_not_chosen == 4


async def test_other_base_weights_are_refused(logged, replayed):
    environment = {**logged.records[0].environment, "base_blake3": "00"}
    logged.records[0] = msgspec.structs.replace(logged.records[0], environment=environment)

    with pytest.raises(ServerError, match="base_blake3"):
        await replayed(logged)


async def test_samplers_of_other_settings_and_machines_are_followed_and_told(logged, replayed):
    other = {**logged.records[1].environment, "threads": "2", "torch": "1.0"}
    logged.records[1] = msgspec.structs.replace(logged.records[1], environment=other)
    summary = await replayed(logged)

    assert summary.samples_compared == 4
    assert [warning.partition(":")[0] for warning in summary.warnings] == ["torch"]


async def test_sealed_samples_are_drawn_again_with_their_key_only(engine, adapters, replayed):
    seal = KeySeal(KeySeal.new_key())
    logged = Logged(seal)
    await logged.draw(engine, 0, adapter=logged.adapter(adapters["a"]))
    assert (await replayed(logged)).verdict == "equal"
    logged._seal = KeySeal(KeySeal.new_key())
    assert (await replayed(logged)).divergence.field == "content"
    logged._seal = ClosedSeal(Forgotten("the contents were forgotten"))
    with pytest.raises(Forgotten):
        await replayed(logged)
    logged._seal = PLAIN
    with pytest.raises(SealBroken, match="their key is not here"):
        await replayed(logged)

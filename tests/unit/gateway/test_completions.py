"""One poll for all samples of a client; samples that are cancelled; copies of a client."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.messages.sampling import SampleDone, SampleFailed
from tinsmith.messages.services import SampleCancelled
from tinsmith.messages.table import SAMPLES

OTHER = "tml-bob"


@pytest.fixture
async def sampler(rig):
    return await rig.sampler()


@pytest.fixture
def ask(rig, sampler, recorded):
    async def ask(seq):
        body = recorded("asample_topk", sampling_session_id=sampler, seq_id=seq)
        return (await rig.post("asample", body)).json["request_id"]

    return ask


async def finish(rig, request_id):
    asked = next(s for s in rig.bus.queued(SAMPLES) if s.request_id == request_id)
    await rig.bus.finish_sample(asked, SampleDone(request_id=request_id))


async def completed(rig, sampler, *, after=0, clone=0, timeout=None, **kwargs):
    target = {
        "type": "sampling_session",
        "sampling_session_id": sampler,
        "cloned_sampler_id": clone,
    }
    body = {"target": target, "prev_cursor": after, "retrieved_request_ids": []}
    body |= {} if timeout is None else {"timeout": timeout}
    return await rig.post("retrieve_futures", body, **kwargs)


async def test_completions_come_in_order_after_the_cursor(rig, sampler, ask):
    first, second = await ask(0), await ask(1)
    await finish(rig, second)
    one = (await completed(rig, sampler)).json
    await finish(rig, first)
    two = (await completed(rig, sampler, after=one["cursor"])).json

    assert one["completions"] == [{"state": "finished", "request_id": second}]
    assert two["completions"] == [{"state": "finished", "request_id": first}]
    assert two["cursor"] > one["cursor"]


async def test_a_poll_is_woken_by_a_result(rig, sampler, ask):
    request_id = await ask(0)
    poll = asyncio.create_task(completed(rig, sampler))
    await finish(rig, request_id)

    assert (await poll).json["completions"][0]["request_id"] == request_id


async def test_a_poll_without_time_to_wait_answers_at_once(rig, sampler, ask):
    await ask(0)

    assert (await completed(rig, sampler, timeout=0.0)).json == {"completions": [], "cursor": 0}


async def test_each_copy_of_a_client_gets_its_own(rig, sampler, ask):
    mine, clone_s = await ask(5), await ask(3 * 10**9 + 5)
    for request_id in (mine, clone_s):
        await finish(rig, request_id)

    original = (await completed(rig, sampler)).json["completions"]
    clone = (await completed(rig, sampler, clone=3)).json["completions"]

    assert [c["request_id"] for c in original] == [mine]
    assert [c["request_id"] for c in clone] == [clone_s]


async def test_nobody_hears_of_the_samples_of_others(rig, sampler):
    assert (await completed(rig, sampler, key=OTHER)).status == 404


async def test_a_cancelled_sample_has_failed_and_is_not_queued(rig, sampler, ask):
    request_id = await ask(0)

    cancelled = await rig.post("cancel_future", {"request_id": request_id})

    assert (cancelled.status, rig.bus.queued(SAMPLES)) == (200, [])
    assert (await rig.poll(request_id)).json["error"] == "cancelled by its client"
    assert SampleCancelled(request_id=request_id) in rig.bus.emitted
    assert (await completed(rig, sampler)).json["completions"][0]["state"] == "failed"


async def test_a_sample_that_is_done_cannot_be_cancelled(rig, sampler, ask):
    request_id = await ask(0)
    await finish(rig, request_id)

    await rig.post("cancel_future", {"request_id": request_id})

    assert not isinstance(await rig.bus.results.get(sampler, 0), SampleFailed)


async def test_cancelling_before_asking_changes_nothing(rig, sampler, ask):
    answer = await rig.post("cancel_future", {"request_id": f"{sampler}:7"})
    request_id = await ask(7)

    assert answer.status == 200
    assert (await rig.poll(request_id)).status == 408


async def test_nobody_cancels_the_samples_of_others(rig, ask):
    request_id = await ask(0)

    answer = await rig.post("cancel_future", {"request_id": request_id}, key=OTHER)

    assert (answer.status, len(rig.bus.queued(SAMPLES))) == (404, 1)


async def test_training_is_not_cancelled(rig):
    model = await rig.model()

    answer = await rig.post("cancel_future", {"request_id": f"{model}:1"})

    assert (answer.status, "only sampling" in answer.detail) == (400, True)


async def test_every_copy_of_a_client_gets_a_number_of_its_own(rig, sampler):
    body = {"sampling_session_id": sampler, "type": "join_sampling_session"}

    answers = await asyncio.gather(*(rig.post("join_sampling_session", body) for _ in range(5)))

    assert sorted(answer.json["client_counter"] for answer in answers) == [1, 2, 3, 4, 5]
    assert (await rig.post("join_sampling_session", body, key=OTHER)).status == 404

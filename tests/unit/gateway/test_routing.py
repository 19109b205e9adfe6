"""Which pool of samplers a request goes to: as the operator says, as its client wishes, or none."""

from __future__ import annotations

import msgspec
import pytest

from tinsmith.keys import owner_of_key
from tinsmith.messages.table import SAMPLES, SERVED
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.routing import WISH

MODEL = "tiny/model"
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}


@pytest.fixture(autouse=True)
async def big(fake, served):
    """The model has another pool beside the default one."""
    (sampler,) = (one for one in served if one.role == "sampler")
    entry = msgspec.structs.replace(sampler, pool="big", context_length=32)
    await fake.table(SERVED).put("a-sampler-big", entry)


@pytest.fixture
def pinned(rig):
    """Pins names to pools."""
    return rig.gateway.routing._pins.update


async def pool_of(rig, sampler=None, **opened):
    """Where a request lies that was just sent."""
    sampler = sampler or await rig.sampler(**opened)
    body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": PROMPT}
    answer = await rig.post("asample", body | {"sampling_params": {"max_tokens": 2}})
    assert answer.status == 200, answer.raw
    (subject,) = await rig.bus.subjects(SAMPLES)
    return SAMPLES.tokens(subject)["share"].rpartition("-")[0]


async def wishing(rig, wish):
    body = {"tags": [], "user_metadata": {WISH: wish}}
    return (await rig.post("create_session", body)).json["session_id"]


async def test_who_says_nothing_is_in_the_default_pool(rig):
    assert await pool_of(rig) == ""


async def test_a_client_may_wish_for_a_pool(rig):
    assert await pool_of(rig, session=await wishing(rig, "big")) == "big"


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("none", f"user_metadata.{WISH}: 'tiny/model' has no samplers of pool 'none'"),
        ("Big!", "is not a label of samplers"),
        ("*", "is not a label of samplers"),
        (7, "is not a label of samplers"),
    ],
)
async def test_a_wish_that_cannot_be_met_is_refused(rig, wish, words):
    session = await wishing(rig, wish)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    answer = await rig.post("create_sampling_session", body)

    assert (answer.status, words in answer.detail) == (400, True), answer.raw


@pytest.mark.parametrize("name", ["owner", "base model"])
async def test_an_operator_may_pin_them(rig, pinned, name):
    pinned({owner_of_key("tml-alice") if name == "owner" else MODEL: "big"})

    assert await pool_of(rig) == "big"


async def test_a_run_goes_before_its_owner_and_both_before_a_wish(rig, pinned):
    model = await rig.model()
    path = await rig.checkpoint(model, "sampler_weights")
    body = {"session_id": await wishing(rig, "big"), "sampling_session_seq_id": 0}
    sampler = (await rig.post("create_sampling_session", body | {"model_path": path})).json
    pinned({model: "", owner_of_key("tml-alice"): "big"})

    assert await pool_of(rig, sampler["sampling_session_id"]) == ""


async def test_a_pin_of_the_base_model_gives_way_to_a_wish(rig, pinned):
    pinned({MODEL: ""})

    assert await pool_of(rig, session=await wishing(rig, "big")) == "big"


async def test_a_pool_that_nobody_has_announced_is_no_pool(rig, pinned):
    pinned({MODEL: "typo"})

    assert await pool_of(rig) == ""


async def test_a_request_that_is_sent_again_is_one(rig):
    sampler = await rig.sampler()

    assert [await pool_of(rig, sampler) for _ in range(2)] == ["", ""]


async def test_limits_are_those_of_the_default_pool(rig):
    found = rig.gateway.models.get(MODEL, "sampler")

    assert (found.pool, found.context_length) == ("", 64)


def test_a_pin_to_what_is_no_label_is_refused():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"pools": {"alice": "No Label"}}, GatewayConfig)

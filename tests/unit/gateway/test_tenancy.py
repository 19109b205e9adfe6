"""Every route: none answers without a key, and none tells what is another's from what is not."""

from __future__ import annotations

import json
import string
from typing import Any, NamedTuple

import pytest

from tinsmith import ids, keys
from tinsmith.errors import InvalidRequest
from tinsmith.messages import table
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb
from tinsmith_gateway.routes import ROUTES

ALICE, BOB = "tml-alice", "tml-bob"
CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
OPEN = {"/healthz", "/readyz", "/api/v1/healthz", "/", "/dashboard/{name}"}
LINKED = {"/api/v1/downloads/{ticket}/{name}"}  # see test_downloads
LORA = {"rank": 8}
LOSS = json.loads(
    '{"custom_loss_seq_id": 0, "name": "n", "inputs": [{"name": "logprobs", "rank": 1}],'
    ' "graph": {"format": 1, "nodes": ['
    '{"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},'
    '{"op": "call_method", "name": "t", "target": "sum", "args": [{"ref": "logprobs"}],'
    ' "kwargs": {}}, {"op": "output", "name": "output", "target": "output", "kwargs": {},'
    ' "args": [{"tuple": [{"ref": "t"}, {"dict": {}}]}]}]}}'
)


class Things(NamedTuple):
    """What a request may name; ``spare`` is the asking owner's own session."""

    session: str
    model: str
    sampler: str
    path: str
    sampler_path: str
    spare: str


def sequenced(things, **fields):
    return {"model_id": things.model, "seq_id": 1, **fields}


def polled(things):
    return {"target": {"sampling_session_id": things.sampler}, "timeout": 0}


PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}


def EMPTY(_things):  # noqa: N802 - a constant
    """No body at all."""


NAMING: dict[tuple[str, str], Any] = {
    ("POST", "/api/v1/session_heartbeat"): lambda t: {"session_id": t.session},
    ("POST", "/api/v1/sessions/{session_id}/finish"): lambda _: {"reason": {"type": "success"}},
    ("GET", "/api/v1/sessions/{session_id}"): EMPTY,
    ("PUT", "/api/v1/sessions/{session_id}/project"): lambda _: {"project_id": "p"},
    ("POST", "/api/v1/create_model"): lambda t: {
        "session_id": t.session,
        "model_seq_id": 7,
        "base_model": "tiny/model",
        "lora_config": LORA,
    },
    ("POST", "/api/v1/load_weights"): lambda t: sequenced(t, path=t.path),
    ("POST", "/api/v1/load_weights#new"): lambda t: {
        "session_id": t.spare,
        "model_seq_id": 7,
        "path": t.path,
    },
    ("POST", "/api/v1/forward_backward"): lambda t: pb.ForwardBackwardRequest(
        model_id=t.model, seq_id=1
    ),
    ("POST", "/api/v1/forward_backward#json"): lambda t: sequenced(
        t, forward_backward_input={"data": [], "loss_fn": "cross_entropy"}
    ),
    ("POST", "/api/v1/forward"): lambda t: sequenced(
        t, forward_input={"data": [], "loss_fn": "cross_entropy"}
    ),
    ("POST", "/api/v1/optim_step"): lambda t: sequenced(t, adam_params={}),
    ("POST", "/api/v1/save_weights"): lambda t: sequenced(t, path="x"),
    ("POST", "/api/v1/save_weights_for_sampler"): lambda t: sequenced(t, path="x"),
    ("POST", "/api/v1/save_weights_external"): lambda t: sequenced(t, path="x"),
    ("POST", "/api/v1/create_custom_loss"): lambda t: {"session_id": t.session, **LOSS},
    ("POST", "/api/v1/create_sampling_session"): lambda t: {
        "session_id": t.session,
        "sampling_session_seq_id": 7,
        "base_model": "tiny/model",
    },
    ("POST", "/api/v1/create_sampling_session#path"): lambda t: {
        "session_id": t.spare,
        "sampling_session_seq_id": 7,
        "model_path": t.sampler_path,
    },
    ("POST", "/api/v1/asample"): lambda t: {
        "sampling_session_id": t.sampler,
        "seq_id": 1,
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 1},
    },
    ("POST", "/api/v1/join_sampling_session"): lambda t: {"sampling_session_id": t.sampler},
    ("POST", "/api/v1/retrieve_future"): lambda t: {"request_id": f"{t.model}:0"},
    ("POST", "/api/v1/retrieve_futures"): polled,
    ("POST", "/api/v1/cancel_future"): lambda t: {"request_id": f"{t.sampler}:1"},
    ("POST", "/api/v1/unload_model"): lambda t: {"model_id": t.model},
    ("POST", "/api/v1/retrieve_future#unload"): lambda t: {"request_id": f"{t.model}:unload"},
    ("POST", "/api/v1/get_info"): lambda t: {"model_id": t.model},
    ("POST", "/api/v1/weights_info"): lambda t: {"tinker_path": t.path},
    ("GET", "/api/v1/samplers/{sampler_id}"): EMPTY,
    ("GET", "/api/v1/training_runs/{run_id}"): EMPTY,
    ("GET", "/api/v1/training_runs/{run_id}#?access_scope=accessible"): EMPTY,
    ("GET", "/api/v1/training_runs/{run_id}/checkpoints"): EMPTY,
    ("DELETE", CHECKPOINT): EMPTY,
    ("POST", f"{CHECKPOINT}/publish"): EMPTY,
    ("DELETE", f"{CHECKPOINT}/publish"): EMPTY,
    ("PUT", f"{CHECKPOINT}/ttl"): lambda _: {"ttl_seconds": None},
    ("POST", "/api/v1/copy_weights"): lambda t: {
        "source_path": t.path,
        "destination_project_id": "p",
    },
    ("GET", f"{CHECKPOINT}/archive"): EMPTY,
    ("GET", f"{CHECKPOINT}/external_weights_urls"): EMPTY,
    ("GET", "/api/v1/sessions/{session_id}/trace_export"): EMPTY,
    ("GET", "/api/v1/dashboard/runs/{run_id}"): EMPTY,
    ("GET", "/api/v1/dashboard/runs/{run_id}/curves"): EMPTY,
}
"""Routes that name a thing, with a body that is good for its owner; ``#`` tells variants apart."""
LISTING = {
    ("GET", "/api/v1/sessions"): None,
    ("POST", "/api/v1/sessions/search"): {"limit": 10, "user_metadata": {}},
    ("GET", "/api/v1/training_runs"): None,
    ("GET", "/api/v1/checkpoints"): None,
    ("GET", "/api/v1/audit"): None,
    ("GET", "/api/v1/dashboard/overview"): None,
    ("GET", "/api/v1/dashboard/runs"): None,
    ("GET", "/api/v1/billing/usage/events?starting_on=2026-01-01T00:00:00Z"
     "&ending_before=2026-01-02T00:00:00Z"): None,
    ("GET", "/api/v1/billing/usage/checkpoints/current"): None,
}  # fmt: skip
NAMELESS = {
    ("POST", "/api/v1/client/config"),
    ("POST", "/api/v1/client/dynamic_config"),
    ("POST", "/api/v1/telemetry"),
    ("GET", "/api/v1/auth/apikey/me"),
    ("DELETE", "/api/v1/auth/apikey/me"),
    ("POST", "/api/v1/auth/token"),
    ("POST", "/api/v1/create_session"),
    ("GET", "/api/v1/get_server_capabilities"),
}
OPENAI = "/v1/"  # names things inside ``model``: see the tests of these routes
ALL = sorted({(route.method, route.path) for route in ROUTES})


@pytest.fixture
async def things(rig):
    """Alice's, and the same ids with a session that never was."""
    session = await rig.session(key=ALICE)
    model = await rig.model(session, key=ALICE)
    sampler = await rig.sampler(session, key=ALICE)
    path = await rig.checkpoint(model)
    sampler_path = await rig.checkpoint(model, "sampler_weights")
    return Things(session, model, sampler, path, sampler_path, await rig.session(key=BOB))


def made_up(things):
    absent = ids.new_session_id()
    return Things(*(text.replace(things.session, absent) for text in things))


async def send(rig, route, things, body, *, key):
    method, template = route
    path, _, variant = template.replace(":.+}", "}").partition("#")
    path = path.format(
        session_id=things.session,
        run_id=things.model,
        sampler_id=things.sampler,
        kind="weights",
        name="step1",
        model="tiny/model",
    )
    if "?" in variant:
        path += variant
    if isinstance(body, pb.ForwardBackwardRequest):
        return await rig.post_proto(body, key=key)
    return await rig.call(method, path, key=key, **({} if body is None else {"json": body}))


def test_every_route_is_in_one_of_these_tables():
    named = {(method, path.partition("#")[0]) for method, path in NAMING}
    listing = {(method, path.partition("?")[0]) for method, path in LISTING}
    known = named | listing | NAMELESS
    rest = {
        (method, path)
        for method, path in ALL
        if path not in OPEN | LINKED and not path.startswith(OPENAI)
    }

    assert rest - known == set(), "add them: who may see what they name?"
    assert known - rest == set()


@pytest.mark.parametrize("route", [r for r in ALL if r[1] not in OPEN | LINKED], ids=" ".join)
async def test_no_route_answers_without_a_key(rig, things, route):
    for key in (None, "tml-nobody", "eyJhbGciOiJub25lIn0.e30."):
        answer = await send(rig, route, things, None, key=key)

        assert answer.status == 401


@pytest.mark.parametrize("route", NAMING, ids=" ".join)
async def test_what_is_another_s_is_told_from_nothing_that_is_not_there(rig, things, route):
    absent = made_up(things)
    answers = [
        await send(rig, route, each, NAMING[route](each), key=BOB) for each in (things, absent)
    ]
    theirs, none = (
        (answer.status, answer.raw.decode().replace(each.session, "SESSION"))
        for answer, each in zip(answers, (things, absent), strict=True)
    )

    assert theirs == none
    if "load_weights#new" not in route[1]:
        assert theirs[0] == 404
    own = things._replace(spare=things.session)
    assert (await send(rig, route, own, NAMING[route](own), key=ALICE)).status not in {401, 404}


@pytest.mark.parametrize("route", LISTING, ids=" ".join)
async def test_lists_have_nothing_of_another(rig, things, route):
    published = await send(rig, ("POST", f"{CHECKPOINT}/publish"), things, None, key=ALICE)
    assert published.status == 200

    theirs = await send(rig, route, things, LISTING[route], key=BOB)

    assert theirs.status == 200
    assert things.session not in theirs.raw.decode()


async def test_loading_another_s_checkpoint_into_one_s_own_model_fails_as_for_none(rig, things):
    model = await rig.model(things.spare, key=BOB)
    failures = []
    for seq, each in enumerate((things, made_up(things)), 1):
        body = {"model_id": model, "seq_id": seq, "path": each.path}
        assert (await rig.post("load_weights", body, key=BOB)).status == 200
        refused = rig.bus.queued(table.OPS)[-1].body
        failures.append(refused.reason.message.replace(each.session, "SESSION"))

    assert failures[0] == failures[1]
    assert "there is no checkpoint" in failures[0]


NO_TOKENS = ["", "a.b", ">", "a b", "a\nb", "a\n", "../x", "é", "\0", "$SYS", "*a"]
HOSTILE = [*NO_TOKENS, "*", "a" * 200, "A" * 26, f"{'a' * 26}:train:0\n", f"{'a' * 26}:train:00"]
SAFE = frozenset(string.ascii_letters + string.digits + "_-")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_user_becomes_part_of_a_subject(text):
    for check in (ids.check_session_id, ids.check_model_id, ids.check_sampler_id):
        with pytest.raises(InvalidRequest):
            check(text)
    for parse in (ids.parse_future_id, ids.parse_path):
        with pytest.raises(InvalidRequest):
            parse(text)
    assert set(ids.pool_token(text)) <= SAFE


@pytest.mark.parametrize("text", NO_TOKENS)
def test_a_subject_is_never_made_of_what_is_no_token(text):
    for row in table.ENTITIES:
        with pytest.raises(ValueError, match="not a subject token"):
            row.subject(id=text)


@pytest.mark.parametrize("text", [*NO_TOKENS[2:], "", "-a", ".a", "a" * 65])
def test_an_owner_s_name_is_strict_and_its_id_fits_a_subject(text):
    with pytest.raises(InvalidRequest, match="owner"):
        keys.check_owner(text)
    assert set(keys.owner_of_name(text)) <= SAFE


def test_ids_have_at_least_128_random_bits():
    made = {ids.new_session_id() for _ in range(1000)}

    assert len(made) == 1000
    # 26 places of 32 letters each, all of which occur.
    assert {len(each) for each in made} == {26}
    assert all(len({each[place] for each in made}) == 32 for place in range(26))

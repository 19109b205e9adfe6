"""What a log says, one line per entry: facts for programs, text for people."""

from __future__ import annotations

import pytest
from tests.unit.logbook.made import MODEL, Made, a_run, forward_backward, scored

from tinsmith.logbook.lines import facts, line
from tinsmith.logbook.overview import overview
from tinsmith.logbook.text import plain, size
from tinsmith.messages import ops
from tinsmith.messages.base import Failed


async def told(made, **span):
    return [entry async for entry in facts(made, made.model_id, **span)]


async def test_every_entry_has_its_kind_and_place():
    found = await told(a_run())

    assert [entry["entry"] for entry in found] == list(range(1, 15))
    assert [entry["kind"] for entry in found] == [
        "owned", "create_model", "forward_backward", "optim_step", "forward_backward",
        "state_saved", "owned", "optim_step", "optim_step", "save_weights", "load_weights",
        "refused", "save_weights_for_sampler", "state_saved",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "details"),
    [
        (1, {"trainer": "trainer-1", "environment": {"torch": "2.8"}}),
        (2, {"base_model": "tiny/llama", "rank": 4, "checkpoint": None}),
        (3, {"loss_fn": "cross_entropy", "forward_only": False, "datums": 1, "tokens": 3,
             "metrics": {"loss:sum": 3.5}}),
        (4, {"learning_rate": 0.01, "metrics": {"grad_norm": 1.5}}),
        (6, {"parts": 1, "size_bytes": 792}),
        (9, {"learning_rate": 1e-4, "failed": "no", "category": "user"}),
        (10, {"name": "best", "path": f"tinker://{MODEL}/weights/best", "size_bytes": 7}),
        (11, {"path": f"tinker://{MODEL}/weights/best", "with_optimizer": False, "parts": 1,
              "size_bytes": 220}),
        (12, {"failed": "no", "category": "user"}),
    ],
)  # fmt: skip
async def test_details_are_those_of_the_op_and_its_result(number, details):
    assert (await told(a_run()))[number - 1]["details"] == details


async def test_digests_are_whole_for_programs_and_short_for_people():
    (fact,) = await told(a_run(), first=1, last=1)

    assert len(fact["op_blake3"]) == len(fact["prev_blake3"]) == 64
    assert f" {fact['op_blake3'][:8]} {fact['result_blake3'][:8]} -" in line(fact)


async def test_a_span_begins_at_an_op_and_ends_before_the_next():
    found = await told(a_run(), first=2, last=3)

    assert [entry["entry"] for entry in found] == [4, 5, 6, 7]


async def test_a_text_from_the_log_cannot_steer_the_terminal():
    failed = Failed(category="user", message="\x1b[2J\r\nforged line " + "x" * 500)
    made = Made().own().op(ops.SaveWeights(name="\x9b31m"), failed)
    shown = line((await told(made))[1])

    assert shown.isprintable()
    assert "forged line" in shown
    assert len(shown) < 400


async def test_the_number_of_tokens_is_that_of_their_bytes_not_of_their_shape():
    body = forward_backward(5)
    datum = body.data[0]
    tokens = type(datum.tokens)("int32", (10**15,), datum.tokens.data)
    lying = ops.ForwardBackward(data=(ops.Datum(tokens=tokens, inputs={}),), loss_fn="x")
    made = Made().own().op(lying, scored(-1.0))

    assert (await told(made))[1]["details"]["tokens"] == 5


async def test_a_run_comes_to_one_row():
    row = await overview(a_run(), MODEL)

    assert (row.last_op, row.owners, row.head_blake3, row.closed) == (9, 2, a_run().head, "")


async def test_a_row_says_what_cannot_be_read():
    made = a_run()
    made.data[4] = b"\xc1"
    row = await overview(made, MODEL)

    assert row.damage.startswith("entry 5: entry: ")


async def test_a_run_without_an_op_has_a_row():
    row = await overview(Made().own({"base_model": "b"}), MODEL)

    assert (row.base_model, row.last_op, row.owners) == ("b", None, 1)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2e9, "2 GB"), (5e12, "5e+03 GB")],
)
def test_sizes_have_a_unit(count, text):
    assert size(count) == text


def test_plain_text_stays_as_it_is():
    assert plain("größe 7") == "größe 7"

"""Order is restored whatever order ops arrive in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinsmith_trainer.sequencer import Sequencer


def test_the_first_chunk_arrives_last_as_the_client_sends_it():
    sequencer = Sequencer(1)
    early = [sequencer.offer(seq, str(seq)) for seq in (2, 3, 4)]

    assert early == [[], [], []]
    assert sequencer.offer(1, "1") == [(1, "1"), (2, "2"), (3, "3"), (4, "4")]
    assert sequencer.offer(5, "5") == [(5, "5")]


@given(st.permutations(range(12)))
def test_any_order_comes_out_in_order(arrivals):
    sequencer = Sequencer(0)
    out = [seq for arrival in arrivals for seq, _ in sequencer.offer(arrival, None)]

    assert out == list(range(12))


def test_what_was_handed_out_is_past():
    sequencer = Sequencer(3)
    sequencer.offer(3, "x")

    assert [sequencer.is_past(seq) for seq in (2, 3, 4)] == [True, True, False]


def test_a_redelivery_of_a_waiting_op_replaces_it():
    sequencer = Sequencer(1)
    sequencer.offer(2, "old")
    sequencer.offer(2, "new")

    assert sequencer.offer(1, "1") == [(1, "1"), (2, "new")]


def test_abandoning_names_the_gap_and_gives_up_what_waited():
    sequencer = Sequencer(1)
    sequencer.offer(4, "4")
    sequencer.offer(3, "3")

    assert sequencer.abandon() == (1, [(3, "3"), (4, "4")])
    assert sequencer.offer(5, "5") == [(5, "5")]
    assert sequencer.is_past(1)


def test_abandoning_one_gap_leaves_what_waits_for_the_next():
    sequencer = Sequencer(1)
    for seq in (2, 4, 5):
        sequencer.offer(seq, str(seq))

    assert sequencer.abandon() == (1, [(2, "2")])
    assert sequencer.abandon() == (3, [(4, "4"), (5, "5")])
    assert sequencer.abandon() == (6, [])

"""Which parts of a log a replay takes."""

from __future__ import annotations

import pytest

from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import StateSaved
from tinsmith_trainer.segments import Sample, Stretch, plan

NEWEST = 99


def states(*seqs):
    return [
        StateSaved(model_id="m", seq=seq, epoch=1, state_blake3="", parts={}, prev_blake3="")
        for seq in seqs
    ]


SAVED = states(20, 40, 60)


def spans(found):
    return [(piece.start and piece.start.seq, piece.first, piece.last) for piece in found.segments]


def test_all_of_a_log_is_one_piece_from_its_first_op():
    assert spans(plan(SAVED, NEWEST, Stretch())) == [(None, 0, 99)]


@pytest.mark.parametrize(
    ("first", "start", "first_repeated"), [(20, None, 0), (21, 20, 21), (59, 40, 41), (61, 60, 61)]
)
def test_a_part_starts_from_the_newest_state_before_its_first_op(first, start, first_repeated):
    found = plan(SAVED, NEWEST, Stretch(first))

    assert spans(found) == [(start, first_repeated, 99)]
    assert found.segments[0].compare_from == first


def test_a_part_ends_where_the_log_ends_at_the_latest():
    assert plan(SAVED, NEWEST, Stretch(0, 30)).last == 30
    assert plan(SAVED, NEWEST, Stretch(0, 300)).last == 99


@pytest.mark.parametrize("stretch", [Stretch(100), Stretch(30, 20), Stretch(100, 300)])
def test_a_part_without_an_op_is_refused(stretch):
    with pytest.raises(InvalidRequest):
        plan(SAVED, NEWEST, stretch)


def test_a_log_is_cut_where_a_state_was_saved():
    found = plan(SAVED, NEWEST, Stretch(), Sample(1.0, 0))

    assert spans(found) == [(None, 0, 20), (20, 21, 40), (40, 41, 60), (60, 61, 99)]


def test_a_part_is_cut_where_a_state_was_saved():
    found = plan(SAVED, NEWEST, Stretch(30, 60), Sample(1.0, 0))

    assert spans(found) == [(20, 21, 40), (40, 41, 60)]
    assert found.segments[0].compare_from == 30


def test_a_sample_is_a_share_of_the_pieces_in_order():
    found = plan(states(*range(1, 99, 2)), NEWEST, Stretch(), Sample(0.2, 7))

    assert (len(found.segments), found.in_all) == (10, 50)
    assert spans(found) == sorted(spans(found), key=lambda span: span[1])


def test_a_sample_has_at_least_one_piece():
    assert len(plan(SAVED, NEWEST, Stretch(), Sample(0.0, 7)).segments) == 1


def test_equal_seeds_choose_equally_and_others_do_not():
    many = states(*range(1, 99, 2))
    one, again, other = (plan(many, NEWEST, Stretch(), Sample(0.2, seed)) for seed in (7, 7, 8))

    assert spans(one) == spans(again) != spans(other)


def test_an_op_between_the_chosen_pieces_is_in_none():
    found = plan(SAVED, NEWEST, Stretch(), Sample(0.25, 0))
    (piece,) = found.segments

    assert found.segment_of(piece.first) is found.segment_of(piece.last) is piece
    assert found.segment_of(piece.last + 1) is None

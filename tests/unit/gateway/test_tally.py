"""The count of what is unfinished: by owner, where it is, and in which order."""

from __future__ import annotations

import pytest

from tinsmith import ids
from tinsmith_gateway.tally import Tally

SESSION = ids.new_session_id()
SAMPLER, MODEL = ids.sampler_id(SESSION, 0), ids.model_id(SESSION, 0)


@pytest.fixture
def tally():
    return Tally()


def sample(seq):
    return ids.future_id(SAMPLER, seq)


def ahead(tally, seq):
    return tally.ahead(tally.get(sample(seq)))


def test_training_samples_and_held_ones_are_counted_apart(tally):
    tally.put(ids.future_id(MODEL, 1), "alice", is_held=False)
    tally.put(sample(1), "alice", is_held=False)
    tally.put(sample(2), "alice", is_held=True)
    tally.put(sample(2), "alice", is_held=True)

    assert (tally.count("alice"), tally.sampling("alice"), tally.held("alice")) == (3, 1, 1)
    assert list(tally.holders()) == ["alice"]
    assert tally.count("bob") == 0


def test_a_place_is_the_number_of_those_before_it_whoever_leaves(tally):
    for seq in range(5):
        tally.put(sample(seq), "alice", is_held=True)
    tally.put(ids.future_id(ids.sampler_id(SESSION, 1), 0), "bob", is_held=True)
    assert [ahead(tally, seq) for seq in range(5)] == [0, 1, 2, 3, 4]

    tally.put(sample(0), "alice", is_held=False)
    tally.remove(sample(2))

    assert [ahead(tally, seq) for seq in (1, 3, 4)] == [0, 1, 2]
    assert (tally.sampling("alice"), tally.held("alice")) == (1, 3)


def test_nothing_is_kept_of_what_has_left(tally):
    for seq in range(3):
        tally.put(sample(seq), "alice", is_held=seq > 0)
    assert not tally.is_first(SAMPLER, 1)
    for seq in range(3):
        tally.remove(sample(seq))

    assert tally.remove(sample(0)) is None
    assert tally.request_ids() == set()
    assert not any((tally._entries, tally._owned, tally._seqs))

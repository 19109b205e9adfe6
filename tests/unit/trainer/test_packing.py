"""The plan of passes: complete, bounded, and a function of the lengths."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tinsmith_trainer.packing import plan

lengths = st.lists(st.integers(1, 3000), max_size=60)
budgets = st.integers(1, 5000)


@given(lengths, budgets)
def test_every_datum_is_in_exactly_one_pass(lengths: list[int], budget: int):
    planned = [row for batch in plan(lengths, budget) for row in batch]

    assert sorted(planned) == list(range(len(lengths)))


@given(lengths, budgets)
def test_only_a_single_datum_may_exceed_the_budget(lengths: list[int], budget: int):
    for batch in plan(lengths, budget):
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget


@given(lengths, budgets)
def test_less_than_half_of_a_row_is_padding_beyond_the_smallest_bucket(
    lengths: list[int], budget: int
):
    for batch in plan(lengths, budget):
        longest, shortest = lengths[batch[0]], lengths[batch[-1]]

        assert longest <= 64 or longest < 2 * shortest


@given(lengths, budgets)
def test_rows_of_a_pass_are_sorted_longest_first(lengths: list[int], budget: int):
    for batch in plan(lengths, budget):
        assert list(batch) == sorted(batch, key=lambda row: (-lengths[row], row))


def test_equal_lengths_fill_passes_in_order():
    assert plan([10] * 5, 20) == ((0, 1), (2, 3), (4,))


def test_a_short_datum_does_not_share_a_pass_with_a_long_one():
    assert plan([1, 512, 500], 4096) == ((1, 2), (0,))

"""How facts add up to hours of use."""

from __future__ import annotations

import pytest
from tests.unit.checkpointer.test_expiry import checkpoint

from tinsmith.bus.facts import Costs, Fact
from tinsmith_checkpointer.metering import (
    HOUR_S,
    NS,
    Account,
    key_of,
    with_sampling,
    with_storage,
    with_training,
)

ACCOUNT = Account("s:train:0", "o", "s", "m")
HOUR_NS = HOUR_S * NS


def facts(*costs):
    return [Fact(n, 0.0, "s:train:0", n, cost) for n, cost in enumerate(costs, 1)]


def test_training_adds_up():
    some = facts(Costs(trained=3), Costs(saved=1), Costs(failed=1), None)

    used = with_training(ACCOUNT.empty(0), some, through=4)

    assert (used.trained_tokens, used.checkpoints, used.through_log) == (3, 1, 4)


def test_sampling_adds_up():
    some = facts(Costs(prefill=3, sampled=2), Costs(cached=4, sampled=1))

    used = with_sampling(ACCOUNT.empty(0), some, through=2)

    assert (used.prefill_tokens, used.cached_tokens, used.sampled_tokens) == (3, 4, 3)


@pytest.mark.parametrize("again", [1, 2, 3])
def test_a_fact_that_is_read_again_counts_once(again):
    some = facts(Costs(trained=1), Costs(trained=2), Costs(trained=4))
    used = with_training(ACCOUNT.empty(0), some[:again], through=again)

    for _ in range(2):
        used = with_training(used, some, through=3)

    assert used.trained_tokens == 7


def test_storage_is_counted_from_the_last_time_on_and_only_within_the_hour():
    kept = [checkpoint(None)]  # one byte since the beginning of time
    used = ACCOUNT.empty(1)
    for now_ns in (HOUR_NS + 10 * NS, HOUR_NS + 10 * NS, HOUR_NS + 30 * NS, 5 * HOUR_NS):
        used = with_storage(used, kept, now_ns=now_ns)

    assert used.byte_seconds == HOUR_S


def test_storage_ends_when_a_checkpoint_expires():
    used = with_storage(ACCOUNT.empty(0), [checkpoint(5 * NS)], now_ns=60 * NS)

    assert used.byte_seconds == 5


def test_each_base_model_of_a_session_is_counted_by_itself():
    assert key_of(1, ACCOUNT) != key_of(1, ACCOUNT._replace(base_model="n"))

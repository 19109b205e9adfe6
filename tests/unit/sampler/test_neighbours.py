"""What a sampler prefers, told from the samplers that are alive."""

from __future__ import annotations

import pytest
from tests.clock import Clock

from tinsmith import pools
from tinsmith.bus import HIGHEST, LOWEST
from tinsmith.messages.registry import ServedModel
from tinsmith.messages.services import ServiceAlive
from tinsmith_sampler.neighbours import BUSY, STALE_S, Neighbours

MODEL = "tiny/llama"


@pytest.fixture
def clock():
    return Clock()


def alive(instance, **fields):
    told = {"service": "sampler", "version": "0", "base_models": (MODEL,)} | fields
    return ServiceAlive(instance=instance, **told)


def served(pool):
    limits = {"vocab_size": 8, "context_length": 8, "tokenizer_id": "t"}
    return ServedModel(name=MODEL, role="sampler", pool=pool, **limits)


def test_alone_it_prefers_all_shares_of_its_pool(clock):
    one = Neighbours("one", MODEL, "", clock)

    assert one.priorities(is_busy=False) == dict.fromkeys(pools.shares(""), HIGHEST)
    assert set(one.priorities(is_busy=True).values()) == {BUSY}
    assert not one.are_there()


def test_each_share_has_one_who_prefers_it_and_all_poll_it(clock):
    names = ["one", "two", "three"]
    of_each = []
    for name in names:
        it = Neighbours(name, MODEL, "", clock)
        for other in names:
            it.heard(alive(other))
        of_each.append(it.priorities(is_busy=False))

    for share in pools.shares(""):
        assert sorted(priorities[share] for priorities in of_each) == [0, 1, 2]


def test_an_idle_one_comes_before_a_busy_one_whatever_it_prefers(clock):
    it = Neighbours("it", MODEL, "", clock)
    for n in range(20):
        it.heard(alive(f"other-{n}"))
    idle, busy = it.priorities(is_busy=False), it.priorities(is_busy=True)

    assert max(idle.values()) < min(busy.values())
    assert max(busy.values()) == LOWEST


@pytest.mark.parametrize(
    "gone", [{"is_taking": False}, {"base_models": ("other",)}, {"base_models": ()}]
)
def test_one_that_takes_no_more_is_not_reckoned_with(clock, gone):
    it = Neighbours("it", MODEL, "", clock)
    it.heard(alive("other"))
    assert it.are_there()
    it.heard(alive("other", **gone))

    assert not it.are_there()
    assert set(it.priorities(is_busy=False).values()) == {HIGHEST}


def test_a_silent_one_is_forgotten(clock):
    it = Neighbours("it", MODEL, "", clock)
    it.heard(alive("other"))
    clock.now += STALE_S + 0.1

    assert not it.are_there()


def test_itself_and_other_services_are_no_neighbours(clock):
    it = Neighbours("it", MODEL, "", clock)
    it.heard(alive("it"))
    it.heard(alive("trainer", service="trainer"))

    assert not it.are_there()


def test_pools_without_a_sampler_are_seen_to_once_that_is_known(clock):
    it = Neighbours("it", MODEL, "big", clock)
    it.announced("k", served("small"))
    it.announced("k", served("gone"))
    it.heard(alive("other", pool="small"))
    own = set(pools.shares("big"))
    before = set(it.priorities(is_busy=False))
    clock.now += STALE_S
    it.heard(alive("other", pool="small"))

    assert before == own
    assert set(it.priorities(is_busy=False)) == own | {*pools.shares("")} | {*pools.shares("gone")}

    it.heard(alive("plain"))  # of the default pool, which has one again

    assert set(it.priorities(is_busy=False)) == own | {*pools.shares("gone")}

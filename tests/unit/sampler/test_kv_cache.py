"""Stretches of the cache: none overlaps another, what is written stays, all comes back."""

from __future__ import annotations

import random

import pytest
import torch

from tinsmith_sampler.kv_cache import PAGE, Extent, KvCache, whole_pages


@pytest.fixture
def cache() -> KvCache:
    """Room for ten pages, in two layers of one head of two numbers."""
    made = KvCache((2, 1, 2), 10 * PAGE, dtype=torch.float32, device="cpu")
    made.beside((3,), torch.uint8)
    return made


def write(cache: KvCache, extent: Extent, value: float) -> None:
    for plane in cache._beside:
        plane[extent.start : extent.start + extent.size] = value
    for planes in cache.layers:
        for plane in planes:
            plane[:, :, extent.start : extent.start + extent.size] = value


def holds(cache: KvCache, extent: Extent, value: float, tokens: int | None = None) -> bool:
    """Whether the first tokens, or all of them, are as written in every layer."""
    part = slice(extent.start, extent.start + (tokens or extent.size))
    planes = [plane[0, 0] for one in cache.layers for plane in one] + cache._beside
    return all(bool((plane[part] == value).all()) for plane in planes)


@pytest.mark.parametrize(("tokens", "slots"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_room_is_handed_out_in_whole_pages(cache, tokens, slots):
    assert whole_pages(tokens) == slots
    assert cache.take(tokens).size == slots


def test_all_of_the_room_can_be_taken_and_no_more(cache):
    assert cache.take(10 * PAGE) is not None
    assert cache.take(1) is None


def test_scattered_room_is_room_and_what_is_kept_moves_whole(cache):
    extents = [cache.take(2 * PAGE) for _ in range(5)]
    for value, extent in enumerate(extents):
        write(cache, extent, value)
    cache.give(extents[0])
    cache.give(extents[2])

    assert cache.take(4 * PAGE) is not None
    assert all(holds(cache, extents[value], value) for value in (1, 3, 4))


def test_a_stretch_grows_where_it_is_last_or_by_moving(cache):
    first, last = cache.take(PAGE), cache.take(PAGE)
    write(cache, first, 1)
    write(cache, last, 2)

    assert cache.grow(last, 3 * PAGE)
    assert cache.grow(first, 2 * PAGE)
    assert holds(cache, first, 1, PAGE)
    assert holds(cache, last, 2, PAGE)
    assert (first.size, last.size, cache.used) == (2 * PAGE, 3 * PAGE, 5 * PAGE)


def test_a_stretch_that_cannot_grow_stays_as_it_was(cache):
    first, last = cache.take(5 * PAGE), cache.take(5 * PAGE)
    write(cache, first, 1)

    assert not cache.grow(first, 6 * PAGE)
    assert not cache.grow(last, 6 * PAGE)
    assert holds(cache, first, 1)
    assert cache.used == 10 * PAGE


def test_a_copy_takes_the_first_tokens_of_every_layer(cache):
    source, target = cache.take(PAGE), cache.take(PAGE)
    write(cache, source, 1)
    write(cache, target, 2)
    cache.copy(source, target, 3)

    assert holds(cache, target, 1, 3)
    assert not holds(cache, target, 1, 4)


def step(cache: KvCache, chance: random.Random, live: dict[int, Extent]) -> None:
    """Take, grow or give back one stretch; a new or grown one is written in full."""
    name = chance.randrange(1, 12)
    tokens = chance.randrange(1, 4 * PAGE)
    free = cache.capacity - cache.used
    if name not in live:
        extent = cache.take(tokens)
        assert (extent is not None) == (whole_pages(tokens) <= free)
        if extent is not None:
            live[name] = extent
    elif chance.random() < 0.5:
        cache.give(live.pop(name))
    else:
        before = live[name].size
        if cache.grow(live[name], before + tokens):
            assert holds(cache, live[name], name, before)
    if name in live:
        write(cache, live[name], name)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_taken_grown_and_given_back_nothing_is_lost(cache, seed):
    chance, live = random.Random(seed), {}
    for _ in range(500):
        step(cache, chance, live)
        assert all(holds(cache, extent, name) for name, extent in live.items())
        assert cache.used == sum(extent.size for extent in live.values())
    for extent in live.values():
        cache.give(extent)

    assert cache.used == 0
    assert cache.take(cache.capacity) is not None

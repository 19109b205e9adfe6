"""Which share of the work a request is in, and who prefers which."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tinsmith import pools
from tinsmith.errors import InvalidRequest
from tinsmith.messages.sampling import AdapterRef, Sample

PROMPT = list(range(200))


def sample(prompt=PROMPT, *, run=None, version="v1"):
    adapter = None if run is None else AdapterRef(version=version, files={}, model_id=run)
    return Sample(
        request_id="r",
        sampler_id="s",
        seq=0,
        base_model="tiny/llama",
        prompt=np.array(prompt, np.int32).tobytes(),
        adapter=adapter,
    )


def share(*args, **kwargs):
    return pools.share_of("", sample(*args, **kwargs))


def test_what_begins_alike_is_in_one_share():
    longer = [*PROMPT[: pools.PREFIX_TOKENS], 7, 8, 9]

    assert share(PROMPT) == share(longer)
    assert share(PROMPT, run="m") == share(longer, run="m", version="v2")


def test_a_run_is_in_few_shares_and_the_base_model_in_all():
    prompts = [[n, *PROMPT] for n in range(200)]
    of_runs = [{share(prompt, run=f"run{n}") for prompt in prompts} for n in range(20)]

    assert {len(found) for found in of_runs} == {pools.SHARES_OF_WEIGHTS}
    assert set().union(*of_runs) == set(pools.shares(""))
    assert {share(prompt) for prompt in prompts} == set(pools.shares(""))


def test_shares_of_a_pool_are_its_own():
    assert not {*pools.shares("")} & {*pools.shares("big")}
    assert pools.share_of("big", sample()) == f"big-{share()}"


def test_members_agree_on_an_order_and_keep_it_when_one_leaves():
    members = [f"sampler-{n}" for n in range(5)]
    for one in pools.shares("big"):
        ranks = {member: pools.rank(one, member, members) for member in members}
        assert sorted(ranks.values()) == list(range(5))
        last = max(ranks, key=ranks.__getitem__)
        left = [member for member in members if member != last]
        assert [pools.rank(one, member, left) for member in left] == [ranks[m] for m in left]


def test_shares_are_spread_over_members():
    members = [f"sampler-{n}" for n in range(4)]
    many = [f"pool{n}-{share}" for n in range(50) for share in range(pools.SHARES)]
    first = Counter(min(members, key=lambda m: pools.rank(one, m, members)) for one in many)

    assert min(first.values()) > len(many) / 4 * 0.7


@pytest.mark.parametrize("label", ["Big", "a-b", "a.b", "x" * 33, "_a", 5, None, "a b", "*"])
def test_labels_that_no_subject_can_hold_are_refused(label):
    with pytest.raises(InvalidRequest, match=r"^field: .* is not a label"):
        pools.check_pool(label, "field")

"""A message becomes rows, and what was drawn becomes a reply."""

from __future__ import annotations

import numpy as np
from tests.unit.sampler.examples import LIMITS, prompt, sample, tokens

from tinsmith.messages.base import BlobRef
from tinsmith.messages.sampling import AdapterRef
from tinsmith_sampler import rows
from tinsmith_sampler.engine import Generated, Scored, TopTokens

ADAPTER = AdapterRef(version="v7", files={"f": BlobRef("00", 0)})


def generated(*values: int, cached: int = 0, topk: TopTokens | None = None) -> Generated:
    return Generated(
        tokens=tokens(*values),
        logprobs=np.full(len(values), -0.5, np.float32),
        stop_reason="stop",
        topk=topk,
        cached_tokens=cached,
    )


def test_the_seed_of_a_row_never_changes_between_releases():
    """Stored seeds must go on giving the rows that they gave."""
    assert rows.row_seed(0, 0) == 824163284354560741
    assert rows.row_seed(0, 1) == 9036145847921363643
    assert rows.row_seed(-1, 0) == 5426907313386755287


def test_neighbouring_seeds_and_indices_give_distinct_row_seeds():
    seeds = {rows.row_seed(seed, index) for seed in range(50) for index in range(50)}

    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 - 1 for seed in seeds)


def test_a_request_without_a_seed_has_one_that_its_redelivery_repeats():
    assert rows.request_seed(sample(request_id="r1")) == rows.request_seed(sample(request_id="r1"))
    assert rows.request_seed(sample(request_id="r1")) != rows.request_seed(sample(request_id="r2"))


def test_a_request_becomes_one_row_per_sample():
    request = sample(num_samples=3, params={"seed": 5}, adapter=ADAPTER, topk_sample_logprobs=2)
    made = rows.expand(request, prompt(4), LIMITS)

    assert [row.index for row in made] == [0, 1, 2]
    assert [row.seed for row in made] == [rows.row_seed(5, index) for index in range(3)]
    assert {(row.adapter, row.max_tokens, row.topk) for row in made} == {("v7", 96, 2)}


def test_a_score_is_made_only_when_the_prompt_is_to_be_scored():
    assert rows.scoring(sample(), prompt(3)) is None
    assert rows.scoring(sample(prompt_logprobs=True), prompt(3)) is not None
    assert rows.scoring(sample(topk_prompt_logprobs=2), prompt(3)).topk == 2


def test_the_reply_keeps_the_order_of_the_rows_and_their_bits():
    done = rows.assemble(sample(), [generated(3, 4), generated(5)], None, "plane")

    assert [np.frombuffer(one.tokens, "<i4").tolist() for one in done.sequences] == [[3, 4], [5]]
    assert np.frombuffer(done.sequences[0].logprobs, "<f4").tolist() == [-0.5, -0.5]
    assert done.prompt_logprobs is None


def test_alternatives_travel_row_by_row_with_their_shape():
    top = TopTokens(np.array([[1, 2], [3, 4]], np.int32), np.zeros((2, 2), np.float32))
    sent = rows.assemble(sample(), [generated(1, 3, topk=top)], None, "").sequences[0].topk

    assert (sent.length, sent.k) == (2, 2)
    assert np.frombuffer(sent.token_ids, "<i4").tolist() == [1, 2, 3, 4]


def test_alternatives_of_the_prompt_alone_leave_its_logprobs_out():
    scored = Scored(logprobs=np.zeros(3, np.float32), topk=TopTokens(np.zeros((3, 1)), np.ones(3)))
    request = sample(topk_prompt_logprobs=1)

    assert rows.assemble(request, [], scored, "").prompt_logprobs is None
    assert rows.assemble(request, [], scored, "").topk_prompt_logprobs.length == 3


def test_only_what_no_task_of_the_request_computed_counts_as_cached():
    done = rows.assemble(sample(), [generated(1, cached=0), generated(1, cached=3)], None, "")

    assert done.prompt_cache_hit_tokens == 0


def test_the_base_model_has_an_empty_weight_version():
    assert rows.assemble(sample(), [generated(1)], None, "").weight_version == ""
    assert rows.assemble(sample(adapter=ADAPTER), [generated(1)], None, "").weight_version == "v7"

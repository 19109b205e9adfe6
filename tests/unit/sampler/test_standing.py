"""What a sampler tells of the lineages that it follows."""

from __future__ import annotations

import pytest

from tinsmith.messages.weights import WeightsStatus
from tinsmith.metrics import names as metrics
from tinsmith_sampler.standing import FENCED, Standing


def status(state="active", **fields):
    told = {"lineage_id": "a", "replica": "s", "plane": "bf16"} | fields
    return WeightsStatus(state=state, **told)


@pytest.fixture
def figures():
    return {}


@pytest.fixture
def standing(figures):
    return Standing(figures)


def value(metric):
    return next(
        s.value for family in metric.collect() for s in family.samples if s.name.endswith("_total")
    )


def test_who_serves_what_it_should_is_ready(standing, figures):
    standing.hear(status(version=1))

    assert standing.readiness().missing == ()
    assert figures[FENCED] == 0


def test_a_fenced_one_is_told_with_its_reason_until_it_serves_again(standing, figures):
    standing.hear(status("fenced", reason="tensor w holds other bits"))
    (missing,) = standing.readiness().missing
    assert "fenced" in missing
    assert "tensor w holds other bits" in missing
    assert figures[FENCED] == 1

    standing.hear(status(version=2))

    assert standing.readiness().missing == ()


def test_one_that_is_followed_no_more_is_missed_by_nobody(standing, figures):
    standing.hear(status("fenced"))

    standing.gone("a")

    assert standing.readiness().missing == ()
    assert figures[FENCED] == 0


def test_bytes_are_counted_once_and_again_from_a_new_receiver(standing):
    before = value(metrics.RECEIVED_BYTES)

    for received in (100, 100, 250, 40):
        standing.hear(status(received_bytes=received))

    assert value(metrics.RECEIVED_BYTES) - before == 290

"""The list of metrics, the page made from it, and what each service tells of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tinsmith.metrics import names
from tinsmith.metrics.describe import page
from tinsmith.metrics.exposition import Exposition

ROOT = Path(__file__).parents[3]
OF_IDS = {"request", "request_id", "model_id", "session", "sampler", "owner", "lineage", "key"}


def test_the_page_is_made_of_the_list():
    assert (ROOT / "docs/metrics.md").read_text() == page()


@pytest.mark.parametrize("declared", names.ALL.values(), ids=lambda one: one.name)
def test_a_name_says_what_it_counts(declared):
    assert re.fullmatch(r"tinsmith_[a-z][a-z0-9_]*", declared.name)
    assert declared.name.endswith("_total") == (declared.kind == "counter")
    assert declared.help.endswith(".")


@pytest.mark.parametrize("declared", names.ALL.values(), ids=lambda one: one.name)
def test_no_label_holds_an_id(declared):
    assert not OF_IDS & set(declared.labels)
    assert not {"service", "base_model"} & set(declared.labels)  # those of the process


@pytest.mark.parametrize("service", ["gateway", "trainer", "sampler", "checkpointer"])
def test_a_service_tells_its_own_metrics_as_prometheus_reads_them(service):
    exposition = Exposition(service)
    exposition.base_model = 'a "model"\n'

    families = list(text_string_to_metric_families(exposition.text().decode()))

    samples = [sample for family in families for sample in family.samples]
    ours = {name for name, one in names.ALL.items() if service in one.services}
    told = {re.sub(r"_(bucket|sum|count)$", "", one.name) for one in samples}
    assert {name for name in told if name.startswith("tinsmith_")} <= ours
    assert {one.labels["base_model"] for one in samples} == {'a "model"\n'}
    assert {one.labels["service"] for one in samples} == {service}
    assert "process_resident_memory_bytes" in told

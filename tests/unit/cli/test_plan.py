from __future__ import annotations

import os

import pytest

from tinsmith.cli import plan
from tinsmith.config import Config, ModelConfig, load

ONE = Config(models=(ModelConfig(name="org/a"),))
TWO = Config(models=(ModelConfig(name="org/a"), ModelConfig(name="org/b")))


def labels(config, services=plan.SERVICES):
    return [label for label, _, _ in plan.instances(config, services)]


def test_one_model_has_one_trainer_and_one_sampler():
    assert labels(ONE) == ["gateway", "trainer", "sampler", "checkpointer"]


def test_two_models_have_two_of_each():
    assert labels(TWO) == [
        "gateway",
        "trainer:a",
        "trainer:b",
        "sampler:a",
        "sampler:b",
        "checkpointer",
    ]


def test_models_of_one_short_name_are_told_apart():
    twins = Config(models=(ModelConfig(name="org/a"), ModelConfig(name="other/a")))

    assert labels(twins, ("trainer",)) == ["trainer:org/a", "trainer:other/a"]


def test_only_the_named_services_are_started():
    assert labels(TWO, ("gateway", "checkpointer")) == ["gateway", "checkpointer"]


def test_trainer_and_sampler_share_the_cores_and_do_not_spin():
    limits = plan.thread_limits(ONE, "trainer", {})

    half = max(1, (os.cpu_count() or 2) // 2)
    assert limits == {"OMP_NUM_THREADS": str(half), "OMP_WAIT_POLICY": "PASSIVE"}


def test_configured_threads_win_over_the_environment():
    config = load(None, {"TINSMITH_TRAINER__THREADS": "7"})

    assert plan.thread_limits(config, "trainer", {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "7"


def test_the_environment_wins_over_the_default():
    assert plan.thread_limits(ONE, "trainer", {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("service", ["gateway", "checkpointer"])
def test_services_without_tensors_have_no_thread_limits(service):
    assert plan.thread_limits(ONE, service, {}) == {}


def test_the_gateway_stops_before_the_workers():
    ranks = {p.label: p.rank for p in plan.service_processes(ONE, ("gateway", "trainer"), {})}

    assert ranks["gateway"] < ranks["trainer"] < plan.BROKER_RANK

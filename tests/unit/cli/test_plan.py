from __future__ import annotations

import os

import pytest

from tinsmith.cli import plan
from tinsmith.config import Config, ModelConfig, load
from tinsmith.errors import ConfigError

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


def test_each_worker_of_the_gateway_is_a_process():
    config = load(None, {"TINSMITH_GATEWAY__WORKERS": "2"})

    assert labels(config, ("gateway", "checkpointer")) == ["gateway:1", "gateway:2", "checkpointer"]


def test_nothing_is_killed_while_a_service_may_still_finish_its_work():
    config = load(None, {"TINSMITH_TRAINER__DRAIN_S": "60", "TINSMITH_SAMPLER__DRAIN_S": "30"})
    gateways, workers, broker = plan.stop_times(config)

    assert plan.stop_times(ONE) == (5.0, 15.0, 20.0)
    assert gateways == 5.0
    assert workers > gateways + 60
    assert broker > workers


def test_models_of_one_short_name_are_told_apart():
    twins = Config(models=(ModelConfig(name="org/a"), ModelConfig(name="other/a")))

    assert labels(twins, ("trainer",)) == ["trainer:org/a", "trainer:other/a"]


def test_a_model_that_is_trained_whole_has_one_more_trainer():
    whole = Config(models=(ModelConfig(name="org/a", full=True), ModelConfig(name="org/b")))
    found = list(plan.instances(whole, ("trainer", "sampler")))

    assert [label for label, _, _ in found] == [
        "trainer:a",
        "trainer:a:full",
        "trainer:b",
        "sampler:a",
        "sampler:b",
    ]
    assert found[1] == ("trainer:a:full", "trainer", "org/a:full")
    assert whole.model("org/a:full").source == "org/a"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ('name = "a:full"', "'a:full' ends in ':full'"),
        ('name = "a"\nfull = true\nquantization = "nf4"', "cannot be trained"),
    ],
)
def test_what_cannot_be_trained_whole_is_no_configuration(tmp_path, model, words):
    file = tmp_path / "tinsmith.toml"
    file.write_text(f"[[models]]\n{model}\n")

    with pytest.raises(ConfigError, match=words):
        load(file, {})


def test_the_name_of_a_whole_model_is_unknown_unless_it_is_configured():
    with pytest.raises(ConfigError, match="set full = true"):
        ONE.model("org/a:full")


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


def test_processes_take_metrics_ports_one_after_the_other():
    chosen = load(None, {"TINSMITH_METRICS__PORT": "9400"})

    processes = plan.service_processes(chosen, ("gateway", "trainer"), {})

    ports = {p.label: p._env["TINSMITH_METRICS__PORT"] for p in processes}
    assert ports == {"gateway": "9400", "trainer": "9401"}


def test_without_a_metrics_port_the_system_chooses_each():
    (process,) = plan.service_processes(ONE, ("gateway",), {})

    assert "TINSMITH_METRICS__PORT" not in process._env

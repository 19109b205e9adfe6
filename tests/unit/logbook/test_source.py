"""Which run is meant, and where it is looked for."""

from __future__ import annotations

import json

import pytest
from tests.unit.logbook.made import MODEL, OTHER, a_run, packed, parts_of_file

from tinsmith.config import BusConfig, Config
from tinsmith.errors import BrokerUnavailable, InvalidRequest, NotFound
from tinsmith.logbook import open_logbook, resolve_run
from tinsmith.logbook.installation import bus_config
from tinsmith.logbook.source import is_file, open_run

SECOND = MODEL.replace(":train:0", ":train:1")
RUNS = [MODEL, SECOND, OTHER]


@pytest.fixture
def config(tmp_path):
    return Config(data_dir=tmp_path / "data")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.tslog"
    path.write_bytes(packed(parts_of_file(a_run())))
    return path


@pytest.mark.parametrize(("text", "run"), [("b", OTHER), (SECOND, SECOND), (MODEL, MODEL)])
def test_a_unique_beginning_is_enough(text, run):
    assert resolve_run(RUNS, text) == run


def test_the_whole_id_is_meant_even_when_it_begins_another():
    assert resolve_run([MODEL, MODEL + "7"], MODEL) == MODEL


def test_an_ambiguous_beginning_lists_the_candidates():
    with pytest.raises(InvalidRequest, match=f"{MODEL}, {SECOND}; give more"):
        resolve_run(RUNS, "a")


def test_an_unknown_run_lists_those_there_are():
    with pytest.raises(NotFound, match=f"'zz'; there are {MODEL}"):
        resolve_run(RUNS, "zz")
    with pytest.raises(NotFound, match="no run has a log"):
        resolve_run([], "zz")


def test_a_long_list_of_candidates_is_cut():
    runs = [f"a{n:02}" for n in range(30)]
    with pytest.raises(InvalidRequest, match=r"a07 and 22 more;"):
        resolve_run(runs, "a")


def test_files_are_told_from_runs(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    (file.parent / "plain").touch()

    assert all(map(is_file, ("run.tslog", "gone.tslog", "./x", "plain")))
    assert not any(map(is_file, (MODEL, "abc")))


async def test_a_file_is_read_without_a_broker(file, config):
    async with open_run(str(file), config) as (book, model_id):
        entries = [entry async for entry in book.entries(model_id)]

    assert (model_id, len(entries)) == (MODEL, 14)


def test_the_broker_of_a_running_up_is_found_in_the_data_folder(config):
    up = config.data_dir / "run" / "up.json"
    up.parent.mkdir(parents=True)
    up.write_text(json.dumps({"nats_url": "nats://token@127.0.0.1:9"}))

    assert bus_config(config).url == "nats://token@127.0.0.1:9"


def test_a_configured_broker_comes_before_that(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(json.dumps({"nats_url": "nats://other:1"}))
    bus = BusConfig(url="nats://mine:1")
    config = Config(data_dir=tmp_path, bus=bus, origins={"bus.url": "TINSMITH_NATS_URL"})

    assert bus_config(config) == bus


def test_else_it_is_where_brokers_are_by_default(config):
    assert bus_config(config) == BusConfig()


async def test_a_broker_that_is_away_is_named(tmp_path):
    bus = BusConfig(url="nats://127.0.0.1:1", connect_timeout_s=1)
    config = Config(data_dir=tmp_path, bus=bus, origins={"bus.url": "here"})
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        async with open_logbook(None, config):
            pass

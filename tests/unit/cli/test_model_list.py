"""What `tinsmith models` lists: configured models, and others that are served."""

from __future__ import annotations

import json

import pytest
from tests import model_folder

from tinsmith.cli.models_command import listed
from tinsmith.config import Config, ModelConfig
from tinsmith.overview import facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder.build(tmp_path_factory.mktemp("model"))


def served(name, role, *instances, pool=""):
    return facts.Model(
        name=name, role=role, pool=pool, context_length=64, vocab_size=99, instances=instances
    )


def of(config, *models):
    return list(listed(config, facts.Overview(at_s=0, models=models)))


def test_a_configured_model_and_who_serves_it(folder):
    config = Config(models=(ModelConfig(name="a/b", path=str(folder), dtype="bfloat16"),))
    (one,) = of(
        config,
        served("a/b", "trainer", "trainer-1"),
        served("a/b", "sampler", "sampler-1", pool="fp8"),
        served("a/b", "sampler"),
    )

    assert (one.files, one.folder, one.dtype) == ("ok", str(folder), "bfloat16")
    assert one.stored_bytes == sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert (one.trainers, one.samplers) == (("trainer-1",), {"fp8": ("sampler-1",)})
    assert (one.context_length, one.vocab_size) == (64, 99)


def test_a_model_that_is_trained_whole_is_listed_beside_its_base(folder):
    config = Config(models=(ModelConfig(name="a/b", path=str(folder), full=True),))
    base, whole = of(config, served("a/b:full", "trainer", "trainer-2"))

    assert (base.name, base.trainers) == ("a/b", ())
    assert (whole.name, whole.is_whole, whole.trainers) == ("a/b:full", True, ("trainer-2",))


def test_files_are_missed_unless_other_machines_have_them(tmp_path):
    config = Config(models=(ModelConfig(name="a/b", path=str(tmp_path / "none")),))

    assert "set path to a folder" in of(config)[0].files
    assert of(config, served("a/b", "sampler", "sampler-1"))[0].files == ""


def test_models_of_other_configurations_are_listed_while_they_are_served(folder):
    config = Config(models=(ModelConfig(name="a/b", path=str(folder)),))
    found = of(config, served("c/d", "trainer", "trainer-1"), served("e/f", "trainer"))

    assert [(one.name, one.is_configured) for one in found] == [("a/b", True), ("c/d", False)]


def test_without_a_broker_the_files_tell(folder):
    config = Config(models=(ModelConfig(name="a/b", path=str(folder)),))
    (one,) = listed(config, None)

    own = json.loads((folder / "config.json").read_text())
    assert one.context_length == own["max_position_embeddings"]
    assert one.vocab_size == own["vocab_size"]
    assert one.trainers == ()

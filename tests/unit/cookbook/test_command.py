"""From `tinsmith cookbook` to the cookbook's environment and the server."""

from __future__ import annotations

import json
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from tinsmith.config import Config
from tinsmith.cookbook import command, recipes, standins
from tinsmith.errors import StartupError
from tinsmith.paths import DataDir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def running(tmp_path: Path) -> Config:
    """Of a server that is up."""
    data = DataDir(tmp_path)
    data.run.mkdir()
    (tmp_path / "key").write_text("tml-1\n")
    told = {"base_url": "http://127.0.0.1:8400", "api_key_file": str(tmp_path / "key")}
    data.up_file.write_text(json.dumps(told))
    return Config(data_dir=tmp_path)


def test_the_server_of_the_data_folder_is_used(running: Config):
    assert command.server(running, {}) == {
        "TINKER_BASE_URL": "http://127.0.0.1:8400",
        "TINKER_API_KEY": "tml-1",
    }


def test_a_key_of_ones_own_is_kept(running: Config):
    found = command.server(running, {"TINKER_API_KEY": "tml-2"})

    assert found == {"TINKER_BASE_URL": "http://127.0.0.1:8400"}


def test_a_server_that_is_named_is_used_instead(running: Config):
    assert command.server(running, {"TINKER_BASE_URL": "http://elsewhere"}) == {}


def test_without_a_server_the_remedy_is_told(tmp_path: Path):
    with pytest.raises(StartupError, match=r"TINKER_BASE_URL is not set.*--data-dir"):
        command.server(Config(data_dir=tmp_path), {})


def test_a_server_that_does_not_answer_is_told_at_once():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, but nobody listens
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"

        with pytest.raises(StartupError, match=r"TINKER_BASE_URL http.*refused; start a server"):
            command.require_answer({"TINKER_BASE_URL": address})


def test_keys_in_the_configuration_must_be_given(running: Config):
    told = {"base_url": "http://127.0.0.1:8400", "api_key_file": ""}
    DataDir(running.data_dir).up_file.write_text(json.dumps(told))

    with pytest.raises(StartupError, match="TINKER_API_KEY is not set"):
        command.server(running, {})


def test_the_environment_beside_ours_is_found(tmp_path: Path):
    python = tmp_path / ".venv-cookbook" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()

    assert command.interpreter({}, str(tmp_path / ".venv")) == str(python)


def test_a_named_interpreter_has_the_first_word(tmp_path: Path):
    named = {"TINSMITH_COOKBOOK_PYTHON": sys.executable}

    assert command.interpreter(named, str(tmp_path / ".venv")) == sys.executable


def test_a_name_that_is_no_program_is_refused(tmp_path: Path):
    with pytest.raises(StartupError, match="is no program; name a Python"):
        command.interpreter({"TINSMITH_COOKBOOK_PYTHON": str(tmp_path / "python")})


def test_without_an_environment_the_remedy_is_told(tmp_path: Path):
    with pytest.raises(StartupError, match="run 'make cookbook', or set"):
        command.interpreter({}, str(tmp_path / ".venv"))


def test_an_environment_without_the_cookbook_says_so():
    with pytest.raises(StartupError, match="tinker-cookbook is not installed here"):
        recipes.module("math_rl")


@pytest.fixture
def cookbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package laid out as the cookbook is."""
    for file in ("__init__", "recipes/rl_loop", "recipes/math_rl/train", "recipes/rubric/data"):
        path = tmp_path / "tinker_cookbook" / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("cookbook")
def test_a_recipe_is_a_module_or_the_train_in_a_folder():
    assert recipes.module("rl_loop") == "tinker_cookbook.recipes.rl_loop"
    assert recipes.module("math_rl") == "tinker_cookbook.recipes.math_rl.train"
    assert recipes.module("math_rl.train") == "tinker_cookbook.recipes.math_rl.train"
    assert recipes.module("rubric.data") == "tinker_cookbook.recipes.rubric.data"


@pytest.mark.usefixtures("cookbook")
@pytest.mark.parametrize(
    "name", ["rubric", "math_rl.test", "", "..", "../rl_loop", "math_rl/train"]
)
def test_what_is_no_recipe_names_those_there_are(name: str):
    with pytest.raises(StartupError, match="at the top it has math_rl, rl_loop, rubric"):
        recipes.module(name)


def test_stand_ins_have_the_columns_of_what_they_stand_for():
    gsm8k = standins.STAND_INS["openai/gsm8k"]()["train"][0]
    problem = standins.STAND_INS["zwhe99/DeepMath-103K"]()["train"][0]
    pair = standins.STAND_INS["Anthropic/hh-rlhf"]()["test"][0]

    assert gsm8k["answer"].endswith(f"#### {problem['final_answer']}")
    assert gsm8k["question"] == problem["question"]
    assert pair["chosen"] != pair["rejected"]
    assert pair["chosen"].split("Assistant:")[0] == pair["rejected"].split("Assistant:")[0]

"""A server with a model that the cookbook has never heard of, and a folder to run recipes in."""

from __future__ import annotations

import pytest
from tests.cookbook import chats
from tests.cookbook.recipe import MODEL, Recipes
from tests.integration.conftest import CLIENT_WARNINGS, connect, start, stop

from tinsmith.testing import tiny_model

CONTEXT_LENGTH = 4096  # the rubric's grader asks for 2048 new tokens


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One for all recipes that need no real model."""
    model = tiny_model.build(tmp_path_factory.mktemp("model"), context_length=CONTEXT_LENGTH)
    running = start(tmp_path_factory.mktemp("server"), model_folder=model)
    yield running
    stop(running)


@pytest.fixture
def client(server):
    """A ServiceClient of that server."""
    yield from connect(server)


@pytest.fixture(scope="session")
def half_taught(server, tmp_path_factory):
    """A state of which one answer in two is short enough to count in math_rl's arithmetic."""
    recipes = _recipes(server, tmp_path_factory.mktemp("taught"))
    file = chats.write(recipes.folder / "sums.jsonl", chats.sums(768))
    recipes.run(
        "chat_sl",
        *(MODEL, f"dataset={file}", "batch_size=64", "max_length=256", "learning_rate=1e-2"),
        *("train_on_what=last_assistant_message", "eval_every=0", "save_every=0"),
        "log_path=taught",
    )
    return recipes.log("taught").checkpoints["final"]["state_path"]


@pytest.fixture
def recipes(server, tmp_path):
    """Recipes against that server, in a folder of the test's own."""
    return _recipes(server, tmp_path)


def _recipes(server, folder):
    return Recipes(server.folder / "tinsmith.toml", server.folder / "data", folder)


def pytest_collection_modifyitems(items):
    """Each starts a process that imports the cookbook, which takes its time."""
    for item in items:
        if "tests/cookbook" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(2400))
            for entry in CLIENT_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(entry))

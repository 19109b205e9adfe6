"""Supervised recipes: they learn, save, roll, and go on where they were killed."""

from __future__ import annotations

import pytest
from tests.cookbook import chats
from tests.cookbook.recipe import MODEL

SHORT = ("batch_size=4", "max_length=256", "learning_rate=3e-3")
STEPS = 32  # of 4 out of the 128 chats that stand in for no_robots


@pytest.fixture
def killed(recipes):
    """The log of a chat_sl that was killed at least two steps after its newest checkpoint."""
    log = recipes.log("chat")

    def is_late():
        saved = [row["batch"] for row in log.checkpoints.values()]
        return bool(saved) and len(log.steps) >= max(saved) + 2

    command = ("chat_sl", MODEL, *SHORT, "eval_every=0", "save_every=0", "rolling_save_every=8")
    command += (f"log_path={log.folder}",)
    recipes.kill_when(is_late, *command)
    return log, command


def test_chat_sl_goes_on_from_its_rolling_checkpoint(killed, recipes):
    log, command = killed
    before, saved = log.steps, log.checkpoints[max(log.checkpoints)]

    recipes.run(*command, "behavior_if_log_dir_exists=resume")

    # The recipe itself cuts off the rows of the steps that were lost.
    kept = saved["batch"]
    assert [row["step"] for row in log.steps] == list(range(STEPS))
    assert log.steps[:kept] == before[:kept]
    # Weights and moments are those of the checkpoint, which the recipe takes after it has sent the
    # step that it is named for; so that step is made twice.
    assert log.steps[kept]["optimizer_steps"] > kept
    nll = log.of("train_mean_nll")
    assert nll[kept] < nll[0] - 0.5
    assert sum(nll[-4:]) < sum(nll[:4]) - 2


def test_rolling_checkpoints_are_deleted_when_they_have_served(recipes, client):
    recipes.run(
        "chat_sl",
        *(MODEL, *SHORT, "max_steps=4", "eval_every=0", "save_every=0", "rolling_save_every=1"),
        "log_path=chat",
    )

    saved = recipes.log("chat").checkpoints
    run_id = saved["final"]["state_path"].removeprefix("tinker://").split("/")[0]
    kept = client.create_rest_client().list_checkpoints(run_id).result().checkpoints
    assert set(saved) == {"000001", "000002", "000003", "final"}
    assert {checkpoint.tinker_path.split("/")[-1] for checkpoint in kept} == {"final"}


def test_chat_sl_saves_and_evaluates(recipes):
    steps = ("max_steps=4", "eval_every=2", "save_every=2")

    recipes.run("chat_sl", MODEL, *SHORT, *steps, "log_path=chat")

    log = recipes.log("chat")
    assert [row["step"] for row in log.steps] == [0, 1, 2, 3]
    assert len(log.of("test/nll")) == 2
    assert set(log.checkpoints) == {"000002", "final"}
    assert "/sampler_weights/" in log.checkpoints["000002"]["sampler_path"]


def test_sl_loop_learns(recipes):
    output = recipes.run("sl_loop", MODEL, *SHORT, "max_steps=8", "save_every=4", "log_path=loop")

    log = recipes.log("loop")
    nll = log.of("train_mean_nll")
    assert len(nll) == 8
    assert min(nll[4:]) < nll[0]
    assert set(log.checkpoints) == {"000004", "final"}
    assert "tiny/llama is not in the cookbook's table: renderer qwen3_instruct" in output
    assert "HuggingFaceH4/no_robots is not in the cache and the hub is off: a stand-in" in output


def test_prompt_distillation_trains_on_a_file(recipes):
    file = chats.write(recipes.folder / "distilled.jsonl", chats.sums(32))

    recipes.run(
        "prompt_distillation",
        *(MODEL, *SHORT, f"file_path={file}", "max_steps=6", "eval_every=0"),
        "log_path=distilled",
    )

    log = recipes.log("distilled")
    nll = log.of("train_mean_nll")
    assert len(nll) == 6
    assert nll[-1] < nll[0]
    assert "final" in log.checkpoints

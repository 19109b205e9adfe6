"""Recipes that compare, grade or imitate: they run to their end, and train."""

from __future__ import annotations

import pytest
from tests.cookbook.recipe import MODEL

RENDERER = "renderer_name=qwen3_instruct"  # these two recipes have another one as their default
GROUPS = ("group_size=2", "max_tokens=16", "eval_every=0")


def test_dpo_prefers_what_was_chosen(recipes):
    recipes.run(
        "preference.dpo",
        *(MODEL, "batch_size=4", "max_length=256", "learning_rate=1e-3", "max_steps=4"),
        "log_path=dpo",
    )

    log = recipes.log("dpo")
    losses = log.of("dpo_loss")
    assert len(losses) == 4
    assert losses[0] == pytest.approx(0.693147, abs=1e-4)  # ln 2: policy and reference are equal
    assert losses[-1] != losses[0]
    assert log.of("test/nll")
    assert "final" in log.checkpoints


def test_shorter_trains(recipes):
    recipes.run(
        "preference.shorter",
        *(MODEL, RENDERER, "batch_size=2", *GROUPS, "max_steps=2", "log_path=shorter"),
    )

    log = recipes.log("shorter")
    assert len(log.steps) == 2
    assert log.of("kl_pre_post_v1")
    assert "final" in log.checkpoints


def test_on_policy_distillation_comes_closer_to_its_teacher(recipes):
    recipes.run(
        "distillation.on_policy_distillation",
        *(MODEL, "teacher_model=tiny/llama", "groups_per_batch=2", *GROUPS, "max_steps=2"),
        *("save_every=1", "log_path=distilled"),
    )

    log = recipes.log("distilled")
    assert len(log.steps) == 2
    assert log.of("teacher_kl")[0] == pytest.approx(0, abs=1e-4)  # it is its own teacher
    assert {"000001", "final"} <= log.checkpoints.keys()


def test_rubric_is_graded_by_a_model(recipes):
    (recipes.folder / "tinker_cookbook" / "example_data").mkdir(parents=True)
    recipes.run("rubric.generate_data")

    recipes.run(
        "rubric",
        *(MODEL, RENDERER, "grader_llm_name=tiny/llama", "grader_renderer_name=qwen3_instruct"),
        *("groups_per_batch=2", "train_group_size=2", "max_steps=1", "max_tokens=8"),
        *("eval_every=0", "save_every=0", "log_path=rubric"),
    )

    log = recipes.log("rubric")
    assert len(log.of("env/all/rubric_score")) == 1
    assert "final" in log.checkpoints

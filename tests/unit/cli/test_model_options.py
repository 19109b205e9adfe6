"""Settings of the trainer and sampler that stand in a model's own entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tinsmith import config
from tinsmith.errors import ConfigError
from tinsmith_sampler.config import SamplerConfig
from tinsmith_trainer.config import TrainerConfig

if TYPE_CHECKING:
    from pathlib import Path

TWO_MODELS = """
[trainer]
max_models = 5
threads = 1
[[models]]
name = "small"
trainer.threads = 2
[[models]]
name = "large"
quantization = "nf4"
context_length = 262144
trainer = {microbatch_tokens = 4096}
sampler.cache_tokens = 524288
"""


def load(text: str, tmp_path: Path, **environ: str) -> config.Config:
    path = tmp_path / "tinsmith.toml"
    path.write_text(text)
    return config.load(path, environ)


def test_the_options_of_the_served_model_stand_in_for_those_of_the_section(tmp_path):
    trainer = load(TWO_MODELS, tmp_path).section(TrainerConfig)

    assert (trainer.max_models, trainer.threads, trainer.microbatch_tokens) == (5, 2, 0)


def test_another_model_brings_its_own(tmp_path):
    chosen = {"TINSMITH_TRAINER__MODEL": "large", "TINSMITH_SAMPLER__MODEL": "large"}
    loaded = load(TWO_MODELS, tmp_path, **chosen)

    assert loaded.section(TrainerConfig).threads == 1
    assert loaded.section(TrainerConfig).microbatch_tokens == 4096
    assert loaded.section(SamplerConfig).cache_tokens == 524288
    assert loaded.model("large").quantization == "nf4"


def test_the_environment_stands_above_a_models_options(tmp_path):
    loaded = load(TWO_MODELS, tmp_path, TINSMITH_TRAINER__THREADS="3")

    assert loaded.section(TrainerConfig).threads == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trainer.thraeds = 2", r"models\[0\].trainer.thraeds: no such key; did you mean 'thr"),
        ("sampler.max_rows = 0", r"models\[0\].sampler.max_rows = 0: must be an integer of at le"),
        ("trainer = 3", r"models\[0\].trainer = 3: must be a table"),
        ("trainer.model = 'b'", r"models\[0\].trainer.model: .*set trainer.model instead"),
        ("quantization = 'fp4'", r'quantization = "fp4": must be one of'),
    ],
)
def test_a_mistake_is_named_whether_or_not_the_model_is_served(tmp_path, line, said):
    text = f"trainer.model = 'b'\n[[models]]\nname = 'a'\n{line}\n[[models]]\nname = 'b'\n"

    with pytest.raises(ConfigError, match=said):
        load(text, tmp_path)

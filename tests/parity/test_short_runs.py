"""The beginning of the runs that ``make test-parity`` makes in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.parity import runs
from tests.parity.independent import Script
from tests.parity.tenants import EngineTenant

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_few_steps_are_those_of_an_independent_script(tmp_path: Path, family: str):
    base = tiny_model.build(tmp_path / "model", family=family)
    ours = EngineTenant(base, rank=8, learning_rate=runs.LEARNING_RATE)
    script = Script(base, ours.export(tmp_path / "adapter"), learning_rate=runs.LEARNING_RATE)

    runs.supervised(ours, script, steps=6)
    runs.reinforced(ours, script, steps=4)

from __future__ import annotations

import pytest

from tinsmith.demo import run
from tinsmith.errors import StartupError


def test_a_results_file_that_cannot_be_written_is_noticed_before_the_training(tmp_path):
    with pytest.raises(StartupError, match=r"--json: .*none/results\.json cannot be written"):
        run.main(data_dir=tmp_path / "data", json_path=tmp_path / "none" / "results.json")
    assert not (tmp_path / "data").exists()

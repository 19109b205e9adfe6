from __future__ import annotations

from pathlib import Path

from tinsmith import config
from tinsmith.config_reference import page

FILE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_recorded_reference_is_todays():
    told = "run: python -m tinsmith.config_reference > docs/configuration.md"

    assert FILE.read_text() == page(), told


def test_every_key_of_every_section_has_a_row():
    lines = page().splitlines()
    sections = [config.BusConfig, config.ModelConfig, config.TopConfig]
    sections += [point.load() for point in config.service_sections().values()]

    for section in sections:
        for key in section.__struct_fields__:
            assert any(line.startswith(f"| `{key}` |") for line in lines), key


def test_a_row_tells_range_default_and_meaning():
    (row,) = (line for line in page().splitlines() if line.startswith("| `connect_timeout_s`"))

    assert row == (
        "| `connect_timeout_s` | number > 0, ≤ 60 | `3.0` "
        "| How long a service tries to connect before it gives up. |"
    )

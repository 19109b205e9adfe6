from __future__ import annotations

import pytest

from tinsmith.demo.style import is_telegram


@pytest.mark.parametrize(
    "answer",
    [
        "Water boils at one hundred degrees Celsius STOP",
        "Ice melts STOP",
        " One day has 24 hours STOP\n",
        "It's a well-known fact STOP",
        "one two three four five six seven eight nine ten eleven STOP",
    ],
)
def test_a_telegram_passes(answer):
    assert is_telegram(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "STOP",
        "Water STOP",
        "Water boils at one hundred degrees Celsius",
        "Water boils at one hundred degrees Celsius stop",
        "Water boils at one hundred degrees Celsius. STOP",
        "Water boils, then boils over STOP",
        "Water boils STOP It boils over STOP",
        "Water  boils STOP",
        "one two three four five six seven eight nine ten eleven twelve STOP",
        "Water boils STOP\nIt boils over STOP",
    ],
)
def test_anything_else_does_not(answer):
    assert not is_telegram(answer)

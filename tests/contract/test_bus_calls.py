"""Calls of nats-py that lose messages or wait for ever; docs/decisions/0002 has the facts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tinsmith.bus

BUS = Path(tinsmith.bus.__file__).parent
LOSE = {
    "publish_async": "its future is lost when the server dies",
    "fetch": "it can hang for its whole timeout after a reconnect",
    "watchall": "it can miss entries, and is silent for long after a restart",
    "object_store": "reads are too slow, and its chunks can be deleted under a reader",
    "key_value": "keys() can miss keys",
    "create_key_value": "keys() can miss keys",
}


@pytest.mark.parametrize("path", sorted(BUS.glob("*.py")), ids=lambda path: path.name)
def test_the_bus_does_without_calls_that_lose(path):
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }

    assert {name: LOSE[name] for name in called & set(LOSE)} == {}

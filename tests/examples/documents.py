"""The Python in the documents: fenced blocks, one program per document."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block, and the line that it begins in."""

    line: int
    code: str


def blocks(path: Path) -> Iterator[Block]:
    """Its Python, from the top."""
    text = path.read_text()
    for match in _FENCE.finditer(text):
        yield Block(text.count("\n", 0, match.start(1)) + 1, match[1])


def program(path: Path, model: str) -> str:
    """All of it as one program, each line where the document has it, for another model."""
    lines: list[str] = []
    for block in blocks(path):
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return re.sub(r"HuggingFaceTB/SmolLM2-135M-Instruct", model, "\n".join(lines) + "\n")

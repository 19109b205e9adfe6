"""The Python in the documents for beginners does what they say, on a real server."""

from __future__ import annotations

import ast
import re

import pytest
from tests.examples.conftest import ROOT
from tests.examples.documents import blocks, program
from tests.integration.conftest import MODEL

EXECUTED = ("README.md", "docs/quickstart.md")
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("name", EXECUTED)
def test_its_python_runs_from_top_to_bottom(scripts, tmp_path, name):
    script = tmp_path / "document.py"
    script.write_text(program(ROOT / name, MODEL))

    assert scripts.run([str(script)])  # it prints something


@pytest.mark.parametrize("name", [*DOCUMENTS, *EXECUTED[:1]])
def test_its_python_is_python(name):
    for block in blocks(ROOT / name):
        compile(block.code, f"{name}:{block.line}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("name", [*DOCUMENTS, *EXECUTED[:1]])
def test_its_links_lead_somewhere(name):
    path = ROOT / name
    for target in _LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), target


def test_blocks_are_found_with_their_lines(tmp_path):
    path = tmp_path / "one.md"
    path.write_text(
        "# A\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n\n```python\nassert x\n```\n"
    )

    assert [(one.line, one.code) for one in blocks(path)] == [(4, "x = 1\n"), (12, "assert x\n")]
    assert program(path, "m").splitlines()[3::8] == ["x = 1", "assert x"]

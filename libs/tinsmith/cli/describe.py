"""Renders the help of all commands as ``docs/cli.md``.

python -m tinsmith.cli.describe > docs/cli.md
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from typer.main import get_command

from tinsmith.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 88
_HEADER = """\
# Commands

Made of the commands' own help by `python -m tinsmith.cli.describe`; a test compares.

`tinsmith status` tells at a glance what runs, what waits and what is wrong, with a remedy for each;
`tinsmith doctor` looks at a machine before anything runs on it. Both end with 1 when there is
something to see to, so that scripts can ask them. `--json` gives programs the same facts, and more:
`libs/tinsmith/overview/facts.py` says what each is. Tables leave columns out on narrow terminals,
and have colours on terminals alone. Where the broker has a user for each service, these commands
are for its `operator` ([Security](security.md)).

`tinsmith --install-completion` has the shell complete commands and options;
`--show-completion` prints what it would install.
"""


def page() -> str:
    """The whole page, Markdown."""
    parts = [_HEADER]
    root: Any = get_command(app)  # a click group, whichever click typer brings
    for path, command in _walk(root, ()):
        name = " ".join(("tinsmith", *path))
        context = command.context_class(
            command, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH
        )
        lines = (line.rstrip() for line in command.get_help(context).splitlines())
        parts += [f"## {name}", "", "```text", *lines, "```", ""]
    return "\n".join(parts)


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401 - see page
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _walk(below, (*path, name))


if __name__ == "__main__":
    sys.stdout.write(page())

"""Reports of the driver as docs/compatibility.md."""

from __future__ import annotations

from tests.compat.expectations import NOT_CALLED, refusal

from tinsmith_gateway.versions import RANGE

COMMAND = "make clients-table"
HEAD = f"""\
# Which versions of the tinker client this server serves

From {RANGE["oldest"]} to {RANGE["newest"]}. A client of another version is refused at once, with
its version and this range; a program that announces no version is served. The range is told by
`get_server_capabilities` as `client_versions`.

The table is made by `{COMMAND}`; `make test-clients` fails when it is not up to date. For
each version, in an environment of its own, a program finds every public method and command of the
client by inspection and calls it on one live server. All versions must also be told the same
losses, log-probabilities and samples, to the last bit: clients before 0.25 send training data in
JSON, and 0.18 also reads its results so; both are turned into what the others send and read.

`yes`: called, and it succeeds. `no`, `not called`: see the note. `-`: not in this version. An
unloaded model takes no more requests, and its trainer has room for another.
"""


def render(reports: dict[str, dict]) -> str:
    """The whole document."""
    notes: list[str] = []
    parts = [HEAD]
    for title, part in (
        ("Methods", "methods"),
        ("Commands", "commands"),
        ("Below the public methods", "lower"),
    ):
        parts.append(f"## {title}\n\n{_table(reports, part, notes)}\n")
    parts.append("## Notes\n\n" + "\n".join(f"{i}. {note}" for i, note in enumerate(notes, 1)))
    return "\n".join(parts) + "\n"


def _table(reports: dict[str, dict], part: str, notes: list[str]) -> str:
    names = sorted({name for report in reports.values() for name in report[part]})
    rows = [["", *reports], ["---"] * (len(reports) + 1)]
    for name in names:
        cells = [_cell(name, version, reports[version][part], notes) for version in reports]
        rows.append([f"`{name}`", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(name: str, version: str, calls: dict[str, dict], notes: list[str]) -> str:
    if name not in calls:
        return "-"
    match calls[name]["outcome"]:
        case "ok":
            return "yes"
        case "not called":
            return f"not called ({_note(NOT_CALLED[name], notes)})"
        case _:
            expected = refusal(name, version)
            why = "unexpected: " + calls[name]["detail"] if expected is None else expected.why
            return f"no ({_note(why, notes)})"


def _note(text: str, notes: list[str]) -> int:
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1

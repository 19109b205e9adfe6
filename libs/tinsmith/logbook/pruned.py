"""What is said of a log that is not there any more, because a policy had it taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.errors import Gone
from tinsmith.logbook.anchors import place_in_words
from tinsmith.logbook.source import resolve_run
from tinsmith.logbook.text import plain
from tinsmith.sealing.seal import moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tinsmith.messages.anchors import PrunedLog


def present_run(runs: Iterable[str], pruned: Mapping[str, PrunedLog], text: str) -> str:
    """As ``resolve_run``; Gone when it means one that was pruned."""
    run = resolve_run(sorted({*runs, *pruned}), text)
    if run in pruned:
        raise Gone(
            f"run: {run}: {sentence(pruned[run])}; a file that it was exported to before can still "
            "be read"
        )
    return run


def sentence(entry: PrunedLog) -> str:
    """When, by whom and why, and what it was."""
    samples = f" and {entry.samples} samples" if entry.samples else ""
    return (
        f"its log was pruned by policy on {moment(entry.pruned_ns)} ({plain(entry.reason)}), by "
        f"{plain(entry.by)}; it had {entry.entries} entries{samples}, the last of them "
        f"{place_in_words(entry.head.place)}"
    )

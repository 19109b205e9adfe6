"""What a replay of samples tells: how far it is, and what it found, for people and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from tinsmith.logbook import replay_output
from tinsmith.logbook.text import plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tinsmith_sampler.replaying import Choice, Findings, Survey


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where log and replay part first, and what each has there."""

    request_id: str
    field: str
    expected: str
    found: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a replay of samples: what ``--json`` prints."""

    samples_of: str  # a run, or a session for those from the base model
    verdict: Literal["equal", "diverged"]
    divergence: Place | None
    samples: int  # in the log
    samples_compared: int
    samples_digest_only: int
    samples_not_chosen: int
    seed: int | None  # of the choice; None when all were chosen
    sequences_compared: int
    tokens_compared: int
    tolerance: float | None
    largest_difference: float | None
    warnings: tuple[str, ...]
    seconds: float


def summarise(
    run: str, surveyed: Survey, choice: Choice, findings: Findings, tolerance: float | None
) -> Summary:
    """The outcome of a replay of the samples of ``run``."""
    return Summary(
        samples_of=run,
        verdict="equal" if findings.divergence is None else "diverged",
        divergence=_place(findings),
        samples=surveyed.samples,
        samples_compared=findings.samples,
        samples_digest_only=surveyed.digest_only,
        samples_not_chosen=surveyed.samples - surveyed.digest_only - surveyed.chosen,
        seed=None if choice.share is None else choice.seed,
        sequences_compared=findings.sequences,
        tokens_compared=findings.tokens,
        tolerance=tolerance,
        largest_difference=None if tolerance is None else findings.largest,
        warnings=tuple(findings.doubts),
        seconds=findings.seconds,
    )


def _place(findings: Findings) -> Place | None:
    if (divergence := findings.divergence) is None:
        return None
    difference = divergence.difference
    return Place(
        request_id=divergence.request_id,
        field=difference.field,
        expected=difference.expected,
        found=difference.found,
    )


def to_json(summary: Summary) -> str:
    """One line."""
    return msgspec.json.encode(summary).decode()


def to_text(summary: Summary) -> str:
    """Some lines for a terminal."""
    # Logs from elsewhere are quoted in them.
    lines = [plain(line) for line in (*_verdict(summary), *_scope(summary))]
    speed = summary.tokens_compared / max(summary.seconds, 1e-9)
    return "\n".join([*lines, f"took {summary.seconds:.1f} s: {speed:.0f} tokens/s"])


def _verdict(summary: Summary) -> list[str]:
    if (place := summary.divergence) is None:
        how = "bit for bit" if summary.tolerance is None else f"within {summary.tolerance:g}"
        return [f"EQUAL {how}: samples of {summary.samples_of}"]
    return [
        f"DIVERGED at sample {place.request_id}, {place.field}: samples of {summary.samples_of}",
        f"  in the log: {place.expected}",
        f"  found here: {place.found}",
    ]


def _scope(summary: Summary) -> list[str]:
    lines = [
        f"compared {summary.samples_compared} of {summary.samples} samples: "
        f"{summary.sequences_compared} sequences, {summary.tokens_compared} tokens"
    ]
    if summary.seed is not None:
        lines.append(f"{summary.samples_not_chosen} not chosen by --seed {summary.seed}")
    if summary.samples_digest_only:
        lines.append(
            f"{summary.samples_digest_only} cannot be drawn again: only digests were logged"
        )
    if summary.largest_difference is not None:
        lines.append(f"largest difference: {summary.largest_difference:g}")
    return lines


def progress(total: int) -> AbstractContextManager[Callable[[], None]]:
    """How far it is in ``total`` samples; see ``replay_output``."""
    return replay_output.progress("Drawing again", "samples", total)

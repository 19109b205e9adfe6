"""What a replay tells: how far it is, and in the end what it found, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
from rich.progress import ProgressColumn, Task
from rich.text import Text

from tinsmith.logbook import replay_output
from tinsmith.logbook.text import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tinsmith.cli.replay import Options
    from tinsmith_trainer.replaying import Divergence, Findings
    from tinsmith_trainer.segments import Plan

Verdict = Literal["equal", "diverged"]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where log and replay part first, and what each has there."""

    seq: int
    op: str
    field: str
    expected: str
    found: str


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of two numbers."""

    amount: float
    seq: int
    field: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a replay: what ``--json`` prints."""

    run: str
    verdict: Verdict
    divergence: Place | None
    first_op: int
    last_op: int
    segments: int
    segments_in_all: int
    seed: int | None  # of the choice of segments; None when all were replayed
    ops_compared: int
    states_compared: int
    ops_led_up: int  # only repeated, to reach the first that is compared
    ops_not_repeated: dict[str, int]
    tolerance: float | None
    largest_difference: Largest | None
    warnings: tuple[str, ...]
    seconds: float
    ops_per_s: float
    tokens_per_s: float


def summarise(
    run: str, options: Options, plan: Plan, findings: Findings, warnings: Sequence[str]
) -> Summary:
    """The outcome of a replay of ``run``."""
    divergence, seconds = findings.divergence, max(findings.seconds, 1e-9)
    first_op = max(options.first, plan.segments[0].first)
    return Summary(
        run=run,
        verdict="equal" if divergence is None else "diverged",
        divergence=None if divergence is None else _place(divergence),
        first_op=first_op,
        last_op=max(first_op, findings.last_seq),
        segments=len(plan.segments),
        segments_in_all=plan.in_all,
        seed=None if plan.sample is None else plan.sample.seed,
        ops_compared=findings.results,
        states_compared=findings.states,
        ops_led_up=findings.led_up,
        ops_not_repeated=dict(findings.not_repeated),
        tolerance=options.tolerance,
        largest_difference=_largest(findings),
        warnings=tuple(warnings),
        seconds=findings.seconds,
        ops_per_s=(findings.results + findings.led_up) / seconds,
        tokens_per_s=findings.tokens / seconds,
    )


def _place(divergence: Divergence) -> Place:
    difference = divergence.difference
    return Place(
        seq=divergence.seq,
        op=divergence.op,
        field=difference.field,
        expected=difference.expected,
        found=difference.found,
    )


def _largest(findings: Findings) -> Largest | None:
    gap = findings.largest
    if not gap.field:
        return None
    return Largest(amount=gap.amount, seq=findings.largest_seq, field=gap.field)


def to_json(summary: Summary) -> str:
    """One line."""
    return msgspec.json.encode(summary).decode()


def to_text(summary: Summary) -> str:
    """Some lines for a terminal."""
    # Logs from elsewhere are quoted in them.
    lines = [plain(line) for line in (*_verdict(summary), *_scope(summary))]
    speed = f"{summary.ops_per_s:.1f} ops/s, {summary.tokens_per_s:.0f} tokens/s"
    lines.append(f"took {summary.seconds:.1f} s: {speed}")
    return "\n".join(lines)


def _verdict(summary: Summary) -> list[str]:
    if (place := summary.divergence) is None:
        how = "bit for bit" if summary.tolerance is None else f"within {summary.tolerance:g}"
        return [f"EQUAL {how}: run {summary.run}"]
    return [
        f"DIVERGED at op {place.seq} ({place.op}), {place.field}: run {summary.run}",
        f"  in the log: {place.expected}",
        f"  found here: {place.found}",
    ]


def _scope(summary: Summary) -> list[str]:
    results, states = summary.ops_compared, summary.states_compared
    lines = [
        f"ops {summary.first_op} to {summary.last_op}: compared {_count(results, 'result')} and "
        f"{_count(states, 'state')}"
    ]
    if summary.seed is not None:
        lines.append(
            f"{summary.segments} of {_count(summary.segments_in_all, 'segment')}, chosen by "
            f"--seed {summary.seed}"
        )
    if kinds := [f"{count} {kind}" for kind, count in sorted(summary.ops_not_repeated.items())]:
        lines.append(f"not repeated: {', '.join(kinds)}")
    if summary.ops_led_up:
        lines.append(f"repeated without comparing: {_count(summary.ops_led_up, 'op')}")
    if (largest := summary.largest_difference) is not None:
        lines.append(f"largest difference: {largest.amount:g} (op {largest.seq}, {largest.field})")
    return lines


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


class _Rate(ProgressColumn):
    """Ops a second, lately."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:.1f} ops/s,")


def progress(total: int | None) -> AbstractContextManager[Callable[[], None]]:
    """How far it is in ``total`` ops, or in those without an end; see ``replay_output``."""
    return replay_output.progress("Replaying", "ops", total, _Rate())

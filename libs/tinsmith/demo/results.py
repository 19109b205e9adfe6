"""What the demo measured: kept, judged, written as JSON and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from tinsmith.demo.style import is_telegram

if TYPE_CHECKING:
    from pathlib import Path

    from tinsmith.demo.loop import Step

MOST_BEFORE, LEAST_AFTER = 0.2, 0.6
"""Pass rates between which the training has to lift the model for the demo to succeed."""
SHOWN = 4
_LONGEST_SHOWN = 120  # characters of an answer


@dataclass(frozen=True, kw_only=True)
class Results:
    """Of one run."""

    base_model: str
    questions: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    steps: tuple[Step, ...]
    checkpoint: str

    @property
    def pass_rates(self) -> tuple[float, float]:
        """Share of held-out questions that are answered in the style, before and after."""
        return pass_rate(self.before), pass_rate(self.after)

    @property
    def tokens_per_s(self) -> float:
        """Of the training, from its first request to its last result."""
        return sum(step.tokens for step in self.steps) / self.steps[-1].ended_s

    @property
    def has_learned(self) -> bool:
        """Whether the pass rate rose as far as it has to."""
        before, after = self.pass_rates
        return before <= MOST_BEFORE and after >= LEAST_AFTER


def pass_rate(answers: tuple[str, ...]) -> float:
    """The share that is in telegram style, 0 to 1."""
    return sum(map(is_telegram, answers)) / len(answers)


def write(results: Results, path: Path) -> None:
    """As one JSON object, for programs."""
    before, after = results.pass_rates
    samples = zip(results.questions, results.before, results.after, strict=True)
    content = {
        "base_model": results.base_model,
        "has_learned": results.has_learned,
        "pass_rate_before": before,
        "pass_rate_after": after,
        "training_seconds": results.steps[-1].ended_s,
        "tokens": sum(step.tokens for step in results.steps),
        "tokens_per_s": results.tokens_per_s,
        "loss_per_token": [step.loss_per_token for step in results.steps],
        "checkpoint": results.checkpoint,
        "samples": [{"question": q, "before": b, "after": a} for q, b, a in samples],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def side_by_side(results: Results) -> Table:
    """A few of the questions with both answers."""
    table = Table(title="Questions that were not in the training data", title_justify="left")
    for heading in ("question", "before", "after"):
        table.add_column(heading)
    rows = list(zip(results.questions, results.before, results.after, strict=True))
    for question, before, after in rows[:: max(1, len(rows) // SHOWN)]:
        table.add_row(question, _shown(before), _shown(after))
    return table


def _shown(answer: str) -> Text:
    text = Text(answer.strip(), style="green" if is_telegram(answer) else "")
    text.truncate(_LONGEST_SHOWN, overflow="ellipsis")
    return text

"""Which checkpoint of an installation a text on a command line means."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinsmith.bus.views import View
from tinsmith.errors import Gone, InvalidRequest, NotFound
from tinsmith.logbook.source import resolve_run
from tinsmith.messages.table import CHECKPOINTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.bus import Bus
    from tinsmith.messages.checkpoints import Checkpoint

KINDS = ("weights", "sampler_weights", "external_weights")
SCHEME = "tinker://"
MAX_SHOWN = 8


async def find(bus: Bus, text: str) -> Checkpoint:
    """The checkpoint at a tinker:// path, or at RUN/NAME or RUN/KIND/NAME.

    RUN may be the beginning of a run's id that no other run with checkpoints has. Without a kind,
    a training checkpoint comes before weights for sampling.

    Raises:
        InvalidRequest: not of these forms, or several runs begin so.
        NotFound: there is none.
        Gone: it has expired.
    """
    run, *kinds_name = text.removeprefix(SCHEME).split("/")
    if not 1 <= len(kinds_name) <= 2 or not all([run, *kinds_name]):
        raise InvalidRequest(
            f"checkpoint: {text[:120]!r} names none; write RUN/NAME, RUN/KIND/NAME or a tinker:// "
            f"path, KIND being one of {', '.join(KINDS)}"
        )
    *kinds, name = kinds_name
    view: View[Checkpoint] = View(bus.table(CHECKPOINTS), lambda checkpoint: checkpoint.model_id)
    watch = await view.watch()
    await watch.close()
    named = [checkpoint for checkpoint in view if checkpoint.kind in KINDS]
    model_id = resolve_run(sorted({checkpoint.model_id for checkpoint in named}), run)
    return _alive(_chosen([c for c in named if c.model_id == model_id], kinds, name, model_id))


def _chosen(there: Iterable[Checkpoint], kinds: list[str], name: str, model_id: str) -> Checkpoint:
    found = {c.kind: c for c in there if c.name == name}
    for kind in kinds or KINDS:
        for checkpoint in found.values():
            if checkpoint.kind == kind:
                return checkpoint
    has = ", ".join(sorted(f"{c.kind}/{c.name}" for c in there)[:MAX_SHOWN])
    raise NotFound(f"checkpoint: {model_id} has no {'/'.join([*kinds, name])[:120]}; it has {has}")


def _alive(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.expires_ns is not None and checkpoint.expires_ns <= time.time_ns():
        raise Gone(f"checkpoint: {checkpoint.path} has expired")
    return checkpoint

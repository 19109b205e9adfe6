"""What ``tinsmith models`` does: models that are configured, and models that are served."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from tinsmith import whole
from tinsmith.cli.looking import FOUND, OK
from tinsmith.cli.tables import BAD, FAINT, GOOD, WIDE, WIDER, Column, console, say, styled, table
from tinsmith.errors import BrokerUnavailable
from tinsmith.logbook.installation import connect
from tinsmith.logbook.text import plain, size
from tinsmith.logs import redact_text
from tinsmith.model_state import state_of
from tinsmith.overview import gather

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinsmith.config import Config, ModelConfig
    from tinsmith.model_state import ModelState
    from tinsmith.overview import Overview
    from tinsmith.overview.facts import Model

ROLES = ("trainer", "sampler")
_COLUMNS = (
    Column("model"),
    Column("files"),
    Column("held as", WIDE),
    Column("context", WIDE, is_number=True),
    Column("vocabulary", WIDER, is_number=True),
    Column("trainers", is_number=True),
    Column("samplers", is_number=True),
)


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as ``--json`` prints it."""

    name: str
    is_configured: bool
    source: str = ""
    folder: str = ""
    files: str = ""
    """Empty: other machines have them; ``ok``; or what is wrong with them."""
    stored_bytes: int = 0
    dtype: str = ""
    quantization: str = "none"
    is_whole: bool = False
    context_length: int | None = None
    vocab_size: int | None = None
    trainers: tuple[str, ...] = ()
    samplers: dict[str, tuple[str, ...]] = {}
    """By pool."""


async def models(loaded: Config, *, is_json: bool) -> int:
    """1 when files are absent, or nobody serves a model that is configured here."""
    overview, why_alone = await _served(loaded)
    found = list(listed(loaded, overview))
    if is_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        out = console()
        say(out, table(_COLUMNS, map(_row, found), out.width))
        for one in found:
            if one.files not in ("", "ok"):
                say(out, Text(f"{one.name}: {plain(one.files, 1000)}", style=BAD))
    if why_alone:
        sys.stderr.write(f"tinsmith models: who serves them is not known: {why_alone}\n")
    return OK if not why_alone and all(map(_is_well, found)) else FOUND


async def _served(loaded: Config) -> tuple[Overview | None, str]:
    """Who serves what; or why that is not known."""
    try:
        async with connect(loaded, name="models") as (bus, _):
            return await gather(bus), ""
    except BrokerUnavailable as error:
        return None, redact_text(str(error))


def listed(loaded: Config, overview: Overview | None) -> Iterator[Listed]:
    """Configured models in their order, then others that are heard."""
    served = () if overview is None else overview.models
    names = []
    for model in loaded.models:
        state = state_of(model)
        for name in (model.name, *([whole.name_of(model.name)] if model.full else [])):
            names.append(name)
            mine = [one for one in served if one.name == name]
            yield _listed(name, mine, model, state)
    for name in dict.fromkeys(one.name for one in served if one.instances):
        if name not in names:
            yield _listed(name, [one for one in served if one.name == name])


def _listed(
    name: str,
    served: Sequence[Model],
    model: ModelConfig | None = None,
    state: ModelState | None = None,
) -> Listed:
    by_role = {role: [one for one in served if one.role == role] for role in ROLES}
    told = next(iter(served), None)
    own = None if state is None else state.context_length
    context = told.context_length if told else (model and model.context_length) or own
    vocabulary = told.vocab_size if told else state.vocab_size if state else None
    return Listed(
        name=name,
        is_configured=model is not None,
        source=model.source if model else "",
        folder=str(state.folder) if state and state.folder else "",
        files=_files(state, is_served=any(one.instances for one in served)),
        stored_bytes=state.stored_bytes if state else 0,
        dtype=model.dtype if model else "",
        quantization=model.quantization if model else "none",
        is_whole=whole.is_whole(name),
        context_length=context,
        vocab_size=vocabulary,
        trainers=tuple(one for entry in by_role["trainer"] for one in entry.instances),
        samplers={entry.pool: entry.instances for entry in by_role["sampler"] if entry.instances},
    )


def _files(state: ModelState | None, *, is_served: bool) -> str:
    if state is None or (is_served and (state.folder is None or not state.folder.is_dir())):
        return ""  # other machines have them
    return state.wrong or "ok"


def _is_well(model: Listed) -> bool:
    # A model that is trained whole is sampled from as its checkpoints are.
    has_samplers = bool(model.samplers) or model.is_whole
    return not model.is_configured or (
        model.files in ("", "ok") and bool(model.trainers) and has_samplers
    )


def _row(model: Listed) -> Sequence[object]:
    files: object = styled("elsewhere", FAINT)
    if model.files == "ok":
        files = styled(size(model.stored_bytes), GOOD)
    elif model.files:
        files = styled("missing" if not model.stored_bytes else "damaged", BAD)
    form = model.quantization if model.quantization != "none" else model.dtype
    counts = [f"{len(found)}{f' {pool}' if pool else ''}" for pool, found in model.samplers.items()]
    return (
        model.name,
        files,
        form or None,
        model.context_length,
        model.vocab_size,
        len(model.trainers),
        ", ".join(counts) or 0,
    )

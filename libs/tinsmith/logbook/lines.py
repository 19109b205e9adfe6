"""What each entry of a log says, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from tinsmith.errors import Forgotten
from tinsmith.logbook.contents import op_of, parts_of, result_of, seal_of
from tinsmith.logbook.entry import place_of
from tinsmith.logbook.text import plain, short
from tinsmith.messages import ops
from tinsmith.messages.base import ITEM_SIZE, Failed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from tinsmith.logbook.entry import Entry
    from tinsmith.logbook.source import Logbook
    from tinsmith.messages.base import Tensor

DIGESTS = ("op", "result", "state")
HEADER = (
    f"{'#':>5} {'seq':>5} {'epoch':>5}  {'kind':<24} {'op':<8} {'result':<8} {'state':<8}  what"
)

Facts = dict[str, Any]
"""Of one entry, ready for JSON."""


async def facts(
    logbook: Logbook, model_id: str, *, first: int = 0, last: int | None = None
) -> AsyncIterator[Facts]:
    """Every entry from the record of op ``first`` to the last one before op ``last + 1``.

    Raises:
        LogDamaged: an entry, its op or its result cannot be read.
    """
    number, has_begun = 0, first == 0
    async for entry in logbook.entries(model_id):
        number += 1
        if isinstance(entry.entry, ops.Record):
            has_begun = has_begun or entry.entry.seq >= first
            if last is not None and entry.entry.seq > last:
                return
        if has_begun:
            yield await _facts(logbook, entry, number)


def line(told: Mapping[str, Any]) -> str:
    """``told`` under ``HEADER``: digests are shortened, long texts cut."""
    digests = " ".join(f"{short(told.get(f'{name}_blake3', '')):<8}" for name in DIGESTS)
    start = f"{told['entry']:>5} {told.get('seq', '-'):>5} {told['epoch']:>5}"
    return f"{start}  {told['kind']:<24} {digests}  {', '.join(_said(told['details']))}".rstrip()


def _said(details: Mapping[str, Any]) -> Iterator[str]:
    for name, value in details.items():
        if isinstance(value, dict):
            yield from _said(value)
        elif value not in (None, "", False):
            shown = f"{value:.6g}" if isinstance(value, float) else plain(value)
            yield plain(name) if value is True else f"{plain(name)} {shown}"


async def _facts(logbook: Logbook, entry: Entry, number: int) -> Facts:
    found = entry.entry
    told: Facts = {"entry": number, "epoch": found.epoch}
    told |= {"blake3": entry.blake3, "prev_blake3": found.prev_blake3}
    match found:
        case ops.Owned():
            details = {"trainer": found.trainer_id, "environment": found.environment}
            return {**told, "kind": "owned", "details": details}
        case ops.StateSaved():
            state = {"seq": found.seq, "state_blake3": found.state_blake3}
            return {**told, **state, "kind": "state_saved", "details": _parts(found)}
        case ops.Record():
            place = place_of(found, number)
            digests = {f"{name}_blake3": getattr(found, f"{name}_blake3") for name in DIGESTS}
            told |= {"seq": found.seq, **digests}
            if (why_closed := (await seal_of(logbook, found)).why_closed) is not None:
                is_gone = isinstance(why_closed, Forgotten)
                contents = "forgotten" if is_gone else "sealed; their key is not here"
                return {**told, "kind": "sealed", "details": {"contents": contents}}
            op, result = await op_of(logbook, found, place), await result_of(logbook, found, place)
            told |= {"kind": type(op.body).__struct_config__.tag}
            return {**told, "details": {**_asked(op.body), **_answered(result)}}
        case _:
            assert_never(found)


def _asked(body: ops.OpBody) -> dict[str, Any]:
    match body:
        case ops.CreateModel():
            rank = None if body.checkpoint else body.lora.rank  # the checkpoint's own
            return {"base_model": body.base_model, "rank": rank, "checkpoint": body.checkpoint}
        case ops.ForwardBackward():
            tokens = sum(_length(datum.tokens) for datum in body.data)
            asked = {"loss_fn": body.loss_fn, "forward_only": body.forward_only}
            return {**asked, "datums": len(body.data), "tokens": tokens}
        case ops.OptimStep():
            return {"learning_rate": body.learning_rate}
        case ops.SaveWeights() | ops.SaveWeightsExternal():
            return {"name": body.name}
        case ops.SaveWeightsForSampler():
            return {"name": body.name, "sampling_session_id": body.sampling_session_id}
        case ops.LoadWeights():
            return {"path": body.path, "with_optimizer": body.with_optimizer}
        case ops.Refused():
            return {}
        case _:
            assert_never(body)


def _answered(result: ops.OpResult) -> dict[str, Any]:
    match result:
        case Failed():
            return {"failed": result.message, "category": result.category}
        case ops.ForwardBackwardDone() | ops.OptimStepDone():
            return {"metrics": result.metrics}
        case (
            ops.SaveWeightsDone() | ops.SaveWeightsForSamplerDone() | ops.SaveWeightsExternalDone()
        ):
            return {"path": result.path, "size_bytes": result.size_bytes}
        case ops.CreateModelDone() | ops.LoadWeightsDone():
            return _parts(result) if result.parts else {}
        case _:
            assert_never(result)


def _parts(found: ops.StateSaved | ops.OpResult) -> dict[str, Any]:
    parts = parts_of(found)
    return {"parts": len(parts), "size_bytes": sum(ref.size for ref in parts.values())}


def _length(tokens: Tensor) -> int:
    """By its bytes: in a log from elsewhere, the shape can say anything."""
    return len(tokens.data) // ITEM_SIZE[tokens.dtype]

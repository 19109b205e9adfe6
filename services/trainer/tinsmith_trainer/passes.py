"""One pass over the model: micro-batches in, scores out, gradients added to the adapters'.

Shapes: B rows, T tokens of the longest row, N real tokens of all rows, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from tinsmith.messages.ops import LoraShape
from tinsmith_trainer.adapters import Adapter
from tinsmith_trainer.head import OutputHead
from tinsmith_trainer.kept import addresses, kept_storages
from tinsmith_trainer.lora import ActiveAdapter, Group
from tinsmith_trainer.microbatch import PAD, MicroBatch
from tinsmith_trainer.parts import Made, frames
from tinsmith_trainer.targets import inject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.messages.ops import Frame
    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.parts import Outcome, Part


class Passes:
    """Runs micro-batches through the base, each with its own adapter."""

    def __init__(self, base: BaseModel) -> None:
        """Puts adapted layers into ``base.model``, once and for all adapters."""
        self._base = base
        self._active = ActiveAdapter()
        self.targets = inject(base.model, self._active)
        self._head = OutputHead(base.unembedding, softcap=base.softcap)

    def run(self, parts: Sequence[Part]) -> list[Outcome]:
        """Score the rows of ``parts``; gradients go to ``grad`` of each adapter's factors.

        Parts must agree on whether there are gradients. What the loss of one part raises is that
        part's outcome, and what the layers raise going down everyone's.
        """
        rows = [
            _Rows(part, frame, self._base) for part, frame in zip(parts, frames(parts), strict=True)
        ]
        with self._active.share(_groups(rows)):  # to the end: layers may be computed twice
            with torch.set_grad_enabled(parts[0].with_gradient):
                output = self._base.backbone(input_ids=_joined(rows), use_cache=False)
            hidden_BTH: Tensor = output.last_hidden_state
            gradient_BTH = torch.zeros_like(hidden_BTH) if hidden_BTH.requires_grad else None
            outcomes = [self._score(one, hidden_BTH, gradient_BTH) for one in rows]
            # Rows without any gradient cost nothing.
            if gradient_BTH is not None and gradient_BTH.any():
                try:
                    hidden_BTH.backward(gradient_BTH)  # type: ignore[no-untyped-call]
                except Exception as exc:  # noqa: BLE001 - no gradient of this pass is whole
                    return [exc for _ in parts]
        return outcomes

    def _score(self, rows: _Rows, hidden_BTH: Tensor, gradient_BTH: Tensor | None) -> Outcome:
        part, batch = rows.part, rows.batch
        try:
            with self._base.gathered_output():
                scores = self._head.score(
                    hidden_BTH[rows.where].detach()[rows.real_BT],
                    batch.targets_NK,
                    batch.terms,
                    rows.pairs.get(self.targets.unembed.name),
                    with_gradient=part.with_gradient,
                    prepare=batch.prepare,
                )
            made = Made(batch.split(scores), rows.frame if rows.is_beside else None)
        except Exception as exc:  # noqa: BLE001 - handed to the one whose loss it is
            return exc
        if gradient_BTH is not None and scores.grad_hidden is not None:
            gradient_BTH[rows.where][rows.real_BT] = scores.grad_hidden
        return made

    def kept_bytes(self, tokens: int) -> int:
        """What autograd keeps of a pass over ``tokens``, with every matrix adapted."""
        shape = LoraShape(rank=1)
        adapter = Adapter.fresh(shape, self.targets.of(shape), self._base.device)
        weights = addresses(self._base.model.parameters())
        ids_BT = torch.zeros((1, tokens), dtype=torch.int64, device=self._base.device)
        with self._active.use(adapter.pairs), kept_storages() as kept:
            self._base.backbone(input_ids=ids_BT, use_cache=False)
        weights.add(adapter.weights.untyped_storage().data_ptr())
        return sum(size for pointer, size in kept.items() if pointer not in weights)


class _Rows:
    """A part's rows in their pass."""

    def __init__(self, part: Part, frame: Frame, base: BaseModel) -> None:
        self.part = part
        self.frame = frame
        self.pairs = cast("Adapter", part.tenant).pairs
        self.batch = MicroBatch(part.rows, part.loss, part.settings, base.device)
        self.ids_BT, self.real_BT = self.batch.padded(frame.length)
        self.where = slice(frame.first, frame.first + len(part.rows))

    @property
    def is_beside(self) -> bool:
        """Whether there are other rows in the pass."""
        return len(self.part.rows) < self.frame.rows or self.part.longest < self.frame.length


def _groups(rows: Sequence[_Rows]) -> tuple[Group, ...]:
    """The adapter of each part's rows; none for those before and after, which are padding."""
    frame, last = rows[0].frame, rows[-1].where.stop
    groups = [Group(len(one.part.rows), one.pairs) for one in rows]
    before, after = Group(frame.first, {}), Group(frame.rows - last, {})
    return tuple(group for group in (before, *groups, after) if group.rows)


def _joined(rows: Sequence[_Rows]) -> Tensor:
    """The token ids of all rows of the pass, int64 [B, T]."""
    frame, last = rows[0].frame, rows[-1].where.stop
    ids = [one.ids_BT for one in rows]
    if len(ids) == 1 and len(ids[0]) == frame.rows:
        return ids[0]
    padding = [ids[0].new_full((n, frame.length), PAD) for n in (frame.first, frame.rows - last)]
    return torch.cat([padding[0], *ids, padding[1]])

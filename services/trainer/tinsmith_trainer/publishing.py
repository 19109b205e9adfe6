"""The lineages of models that are trained whole: each save for samplers is a version of one.

A lineage is called as its model is. Whoever owns the model's log takes its lineage too, so that an
earlier owner's publisher is refused by the broker as its appends to the log are.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from tinsmith.errors import BrokerUnavailable, Fenced, NoRoom, StorageFull
from tinsmith.messages.table import WEIGHTS_STATUS
from tinsmith.messages.weights import PublishedVersion
from tinsmith.metrics import names as metrics
from tinsmith.weights.policy import Policy
from tinsmith.weights.publisher import Publisher, Wanted
from tinsmith.weights.roll import Roll
from tinsmith_trainer import canonical
from tinsmith_trainer.whole_model import check_room

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.bus import Bus
    from tinsmith.weights.bits import Bits
    from tinsmith.weights.publisher import Published
    from tinsmith.weights.specs import TensorSpec
    from tinsmith_trainer.trainable import Snapshot

log = structlog.get_logger(__name__)

DELTAS = Policy(full_below_bytes=0)
"""Of models that compute in bfloat16, in which few weights change in a step; of all sizes."""

WHOLES = Policy(full_below_bytes=1 << 62)
"""Of models in float32, in which every weight changes: coding would gain a quarter."""

RETRY_PAUSE_S = 0.5
UPKEEP_S = 2.0

_ALL = 2**62  # a stream sequence that is never reached


class Publishing:
    """Publishes what is saved for samplers; one publisher for each model."""

    def __init__(
        self, bus: Bus, publisher_id: str, figures: dict[str, float], *, patience_s: float
    ) -> None:
        """``bus`` is one of its own: chunks would delay everything else on their connection.

        ``figures`` are those of the liveness ping; the newest version's are kept there.
        """
        self._bus = bus
        self._publisher_id = publisher_id
        self._patience_s = patience_s
        self._publishers: dict[str, Publisher] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._due: set[str] = set()
        self._roll = Roll()
        self._figures = figures

    async def run(self) -> None:
        """Hear of receivers, and keep up what is stored beside the deltas, until cancelled.

        Raises:
            BrokerUnavailable: its connection was closed for good.
        """
        heard = await self._bus.listen(WEIGHTS_STATUS, self._roll.hear)
        try:
            while not self._bus.closed.is_set():
                await asyncio.sleep(UPKEEP_S)
                self._count_replicas()
                for model_id in list(self._publishers):
                    await self._keep_up(model_id)
            raise BrokerUnavailable("the connection for weights was closed for good")
        finally:
            await heard.close()

    def turn(self, model_id: str) -> asyncio.Lock:
        """Whoever enters first publishes first: versions are in the order of their ops."""
        return self._turns.setdefault(model_id, asyncio.Lock())

    async def has_lineage(self, model_id: str) -> bool:
        """Whether the model has been published by anybody."""
        return await self._bus.lineages.newest(model_id, "open") is not None

    async def take_over(self, model_id: str, snapshot: Snapshot) -> None:
        """Take the lineage from an earlier owner of the model, which is ``snapshot`` now.

        Raises:
            BrokerUnavailable: it may have been taken or not.
            Fenced: the model has another owner again.
        """
        try:
            publisher = await self._publisher(model_id, snapshot)
        except (NoRoom, StorageFull) as exc:  # the log fences, and nothing is published for now
            log.warning("lineage not taken", lineage=model_id, error=str(exc))
        else:
            log.info("lineage taken", lineage=model_id, epoch=publisher.epoch)

    async def publish(self, model_id: str, snapshot: Snapshot) -> PublishedVersion | None:
        """Make ``snapshot`` the newest version; None if it cannot be published for now.

        Then samplers load the checkpoint's files, as those do that follow no lineage.

        Raises:
            Fenced: another trainer has the model.
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            try:
                return await self._publish(model_id, snapshot)
            except Fenced:
                self._publishers.pop(model_id, None)
                raise
            except (NoRoom, StorageFull, BrokerUnavailable) as exc:
                is_over = asyncio.get_running_loop().time() > deadline
                if is_over or not isinstance(exc, BrokerUnavailable):
                    log.warning("version not published", lineage=model_id, error=str(exc))
                    return None
            await asyncio.sleep(RETRY_PAUSE_S)

    async def end(self, model_id: str) -> None:
        """Free what the lineage takes; who still asks for its versions has the files."""
        if self._publishers.pop(model_id, None) is None:
            return
        try:
            await self._bus.lineages.chunks.forget(model_id, before=_ALL)
        except BrokerUnavailable as exc:  # it only takes room
            log.warning("lineage not freed", lineage=model_id, error=str(exc))

    def forget(self, model_id: str) -> None:
        """The model is not here any more."""
        self._publishers.pop(model_id, None)
        self._turns.pop(model_id, None)
        self._due.discard(model_id)

    async def _publish(self, model_id: str, snapshot: Snapshot) -> PublishedVersion:
        publisher = await self._publisher(model_id, snapshot)
        bits = await asyncio.to_thread(canonical.bits, snapshot)
        published = await publisher.publish(bits, step=snapshot.step)
        self._due.add(model_id)
        self._tell(model_id, published, sum(one.size for one in bits.values()))
        _measure(published, bits)
        return PublishedVersion(lineage_id=model_id, version=published.version, root=published.root)

    async def _publisher(self, model_id: str, snapshot: Snapshot) -> Publisher:
        if (known := self._publishers.get(model_id)) is not None:
            return known
        specs = canonical.specs(snapshot)
        check_room("publishing", canonical.size_bytes(snapshot))
        wanted = Wanted(
            lineage_id=model_id,
            publisher_id=self._publisher_id,
            content="full",
            about={"base_model": snapshot.base_model},
            policy=WHOLES if _is_all_float32(specs) else DELTAS,
        )
        # Copies: the publisher moves them on with every version.
        bits = await asyncio.to_thread(
            lambda: {name: one.copy() for name, one in canonical.bits(snapshot).items()}
        )
        publisher = await Publisher.open(self._bus.lineages, wanted, specs, bits)
        self._publishers[model_id] = publisher
        return publisher

    async def _keep_up(self, model_id: str) -> None:
        """Store what is due; what fails is due again."""
        wants_full = self._roll.wants_full(model_id)
        publisher = self._publishers.get(model_id)
        if publisher is None or not (wants_full or model_id in self._due):
            return
        self._due.discard(model_id)
        try:
            await publisher.upkeep(live=self._roll.live(model_id), wants_full=wants_full)
        except Fenced:
            self._publishers.pop(model_id, None)
        except (BrokerUnavailable, StorageFull) as exc:
            self._due.add(model_id)
            log.warning("lineage not kept up", lineage=model_id, error=str(exc))

    def _count_replicas(self) -> None:
        """Who acknowledges what is published here, by serving it."""
        heard = [
            status.version - publisher.version
            for lineage_id, publisher in self._publishers.items()
            for status in self._roll.replicas(lineage_id)
        ]
        metrics.REPLICAS_HEARD.set(len(heard))
        metrics.REPLICAS_BEHIND.set(sum(behind < 0 for behind in heard))

    def _tell(self, model_id: str, published: Published, elements: int) -> None:
        figures = {
            "weights_version": float(published.version),
            "weights_bytes": float(published.size),
            "weights_density": round(published.changed / max(elements, 1), 6),
            "weights_encode_ms": round(published.encode_ms, 1),
            "weights_publish_ms": round(published.publish_ms, 1),
        }
        self._figures |= figures
        told = {"lineage": model_id, "root": published.root, "form": published.form}
        log.info("version published", **told, **figures)


def _measure(published: Published, bits: Mapping[str, Bits]) -> None:
    metrics.FORMS.labels(published.form).inc()
    metrics.PUBLISHED_BYTES.labels(published.form).inc(published.size)
    if published.form == "same":
        return
    elements = sum(one.size for one in bits.values())
    metrics.ELEMENTS_CHANGED.observe(published.changed / max(elements, 1))
    size = sum(one.nbytes for one in bits.values())
    metrics.SIZE_RATIO.observe(published.size / max(size, 1))
    metrics.ENCODE_SECONDS.observe(published.encode_ms / 1e3)
    metrics.PUBLISH_SECONDS.observe(published.publish_ms / 1e3)


def _is_all_float32(specs: Mapping[str, TensorSpec]) -> bool:
    return all(spec.dtype == "float32" for spec in specs.values())

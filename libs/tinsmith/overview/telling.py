"""From what is known to the facts that are shown. Pure: nothing is asked, nothing is printed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith import ids, pools, whole
from tinsmith.messages.table import HELD, OPS, PLACEMENTS, SAMPLES, STREAMS
from tinsmith.overview import facts
from tinsmith.overview.known import is_live, why_ended
from tinsmith.overview.problems import problems

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.messages import registry as entries
    from tinsmith.messages.services import ServiceAlive
    from tinsmith.messages.table import Queue
    from tinsmith.overview.known import Known

QUEUES: dict[str, Queue[Any]] = {
    "ops": OPS,
    "placements": PLACEMENTS,
    "samples": SAMPLES,
    "held": HELD,
}
"""By the names that operators know."""


def tell(known: Known, *, at_s: float, has_ended: bool = False) -> facts.Overview:
    """All facts; with ``has_ended`` of runs that are over, too."""
    alive = known.pings.alive()
    overview = facts.Overview(
        at_s=at_s,
        services=tuple(map(_service, alive)),
        runs=tuple(_runs(known, alive, has_ended=has_ended)),
        run_count=len(known.registry.runs),
        queues=tuple(_queues(known, alive)),
        lineages=tuple(_lineages(known)),
        models=tuple(_models(known, alive)),
        broker=_broker(known),
        unknown=tuple(known.measured.unknown),
    )
    return msgspec.structs.replace(overview, problems=tuple(problems(overview)))


def _service(alive: ServiceAlive) -> facts.Service:
    return facts.Service(
        service=alive.service,
        instance=alive.instance,
        version=alive.version,
        base_models=alive.base_models,
        pool=alive.pool,
        labels=alive.labels,
        load=alive.load,
        trouble=alive.trouble,
        is_taking=alive.is_taking,
        metrics_url=alive.metrics_url,
    )


def _runs(known: Known, alive: list[ServiceAlive], *, has_ended: bool) -> Iterable[facts.Run]:
    registry, measured = known.registry, known.measured
    names = {key.owner: key.name for key in registry.keys.values()}
    there = {ping.instance for ping in alive}
    places = {model: place for ping in alive for model, place in ping.places.items()}
    queued = Counter(
        ids.of_token(OPS.tokens(subject)["model"])
        for subject in measured.subjects.get(OPS.stream, ())
    )
    saved = Counter[str]()
    bytes_of = Counter[str]()
    for checkpoint in registry.checkpoints.values():
        if checkpoint.kind != "ephemeral":
            saved[checkpoint.model_id] += 1
            bytes_of[checkpoint.model_id] += checkpoint.size_bytes
    for run in sorted(registry.runs.values(), key=lambda run: -run.created_ns):
        if not has_ended and not is_live(run, registry):
            continue
        model_id = run.model_id
        last, place = measured.last_ops.get(model_id), places.get(model_id)
        trainer = measured.owners.get(model_id, "")
        ended = why_ended(run, registry)
        yield facts.Run(
            model_id=model_id,
            session_id=run.session_id,
            owner=run.owner,
            owner_name=names.get(run.owner, ""),
            base_model=run.base_model,
            rank=run.lora.rank,
            is_whole=whole.is_whole(run.base_model),
            optimizer=run.optimizer,
            project_id=run.project_id,
            created_s=run.created_ns / 1e9,
            is_live=not ended,
            ended=ended,
            trainer=trainer,
            is_held=not ended and trainer in there,
            last_op=None if last is None else last.seq,
            last_op_s=None if last is None else last.at_s,
            queued=queued[model_id],
            waiting_turns=None if place is None else place.turns,
            waiting_tokens=0 if place is None else place.tokens,
            checkpoints=saved[model_id],
            checkpoint_bytes=bytes_of[model_id],
        )


def _queues(known: Known, alive: list[ServiceAlive]) -> Iterable[facts.Queue]:
    states = {state.name: state for state in known.measured.streams}
    names = _by_token(known.registry.runs.values(), known.registry.served.values(), alive)
    for name, queue in QUEUES.items():
        state = states.get(queue.stream)
        if state is None:
            continue
        counted = Counter[tuple[str, str]]()
        for subject in known.measured.subjects.get(queue.stream, ()):
            tokens = queue.tokens(subject)
            if "pool" in tokens:
                model = names.get(tokens["pool"], tokens["pool"])
                counted[model, pools.pool_of(tokens.get("share", ""))] += 1
        yield facts.Queue(
            name=name,
            stream=queue.stream,
            messages=state.messages,
            size=state.size,
            max_bytes=state.max_bytes,
            oldest_s=state.oldest_s,
            shares=tuple(
                facts.Share(base_model=model, pool=pool, messages=count)
                for (model, pool), count in sorted(counted.items())
            ),
        )


def _by_token(
    runs: Iterable[entries.Run],
    served: Iterable[entries.ServedModel],
    alive: Iterable[ServiceAlive],
) -> dict[str, str]:
    """Subject token -> name, of every base model that was ever heard of."""
    names = {run.base_model for run in runs} | {model.name for model in served}
    names |= {model for ping in alive for model in ping.base_models}
    return {ids.pool_token(name): name for name in names}


def _lineages(known: Known) -> Iterable[facts.Lineage]:
    for head in sorted(known.registry.heads.values(), key=lambda head: head.lineage_id):
        run = known.registry.runs.get(ids.token(head.lineage_id))
        heard = known.roll.replicas(head.lineage_id)
        if not heard and (run is None or not is_live(run, known.registry)):
            continue  # of a run that is over, and that nobody serves
        yield facts.Lineage(
            lineage_id=head.lineage_id,
            version=head.version,
            epoch=head.epoch,
            replicas=tuple(
                facts.Replica(
                    replica=status.replica,
                    plane=status.plane,
                    state=status.state,
                    version=status.version,
                    behind=max(status.behind, head.version - status.version),
                    lag_ms=status.lag_ms,
                    reason=status.reason,
                )
                for status in sorted(heard, key=lambda status: status.replica)
            ),
        )


def _models(known: Known, alive: list[ServiceAlive]) -> Iterable[facts.Model]:
    served = known.registry.served.values()
    for model in sorted(served, key=lambda model: (model.name, model.role, model.pool)):
        yield facts.Model(
            name=model.name,
            role=model.role,
            pool=model.pool,
            context_length=model.context_length,
            vocab_size=model.vocab_size,
            max_rank=model.max_rank,
            arch=model.arch,
            tokenizer_id=model.tokenizer_id,
            labels=model.labels,
            instances=tuple(
                ping.instance
                for ping in alive
                if ping.service == model.role
                and model.name in ping.base_models
                and ping.pool == model.pool
            ),
        )


def _broker(known: Known) -> facts.Broker | None:
    broker = known.measured.broker
    if broker is None:
        return None
    return facts.Broker(
        version=broker.version,
        rtt_ms=round(1e3 * broker.rtt_s, 2),
        skew_ms=round(1e3 * broker.skew_s, 2),
        storage=broker.storage,
        max_storage=broker.max_storage,
        max_payload=broker.max_payload,
        streams=tuple(
            facts.Stream(
                name=state.name,
                kind=STREAMS.get(state.name, ""),
                messages=state.messages,
                size=state.size,
                max_bytes=state.max_bytes,
                oldest_s=state.oldest_s,
                consumers=state.consumers,
                replicas=state.replicas,
            )
            for state in known.measured.streams
        ),
    )

"""From pings and entries to facts."""

from __future__ import annotations

from tinsmith import ids
from tinsmith.messages import checkpoints, ops, registry, services
from tinsmith.overview.known import STALE_S, Known, Pings
from tinsmith.overview.telling import tell

SESSION = ids.new_session_id()
BASE = "tiny/llama"


def alive(instance="trainer-a", **changes):
    known = {"service": "trainer", "version": "1", "base_models": (BASE,)}
    return services.ServiceAlive(instance=instance, **known | changes)


def known_run(known, number=0, **changes):
    entry = registry.Run(
        model_id=ids.model_id(SESSION, number), session_id=SESSION, owner="o",
        created_ns=number, base_model=BASE, lora=ops.LoraShape(rank=8), **changes,
    )  # fmt: skip
    known.registry.runs[ids.token(entry.model_id)] = entry
    return entry


def session(status="active"):
    return registry.Session(session_id=SESSION, owner="o", created_ns=0, status=status)


def checkpoint(model_id, name, kind="weights"):
    return checkpoints.Checkpoint(
        path=f"tinker://{model_id}/{kind}/{name}", model_id=model_id, kind=kind, name=name,
        op_seq=1, base_model=BASE, lora=ops.LoraShape(rank=8), step=1, parts={}, size_bytes=10,
        created_ns=1,
    )  # fmt: skip


def test_a_service_that_is_silent_for_long_is_gone():
    now = [0.0]
    pings = Pings(clock=lambda: now[0])
    pings.hear(alive())
    now[0] = STALE_S - 1
    pings.hear(alive("trainer-b"))

    assert [ping.instance for ping in pings.alive()] == ["trainer-a", "trainer-b"]
    now[0] = STALE_S + 1
    assert [ping.instance for ping in pings.alive()] == ["trainer-b"]


def test_runs_are_live_until_released_or_their_session_ends():
    known = Known()
    known_run(known, 0)
    known_run(known, 1, unloaded_ns=5)
    known.registry.sessions[SESSION] = session()

    assert [(run.model_id[-1], run.ended) for run in tell(known, at_s=0, has_ended=True).runs] == [
        ("1", "released"),
        ("0", ""),
    ]
    assert len(tell(known, at_s=0).runs) == 1
    known.registry.sessions[SESSION] = session("expired")
    assert tell(known, at_s=0).runs == ()


def test_a_run_whose_trainer_is_silent_is_not_held():
    known = Known()
    run = known_run(known)
    known.registry.sessions[SESSION] = session()
    known.measured.owners[run.model_id] = "trainer-a"

    assert not tell(known, at_s=0).runs[0].is_held
    known.pings.hear(alive())
    assert tell(known, at_s=0).runs[0].is_held


def test_checkpoints_are_counted_but_for_those_of_samplers():
    known = Known()
    run = known_run(known)
    known.registry.sessions[SESSION] = session()
    for name, kind in (("a", "weights"), ("b", "sampler_weights"), ("c", "ephemeral")):
        entry = checkpoint(run.model_id, name, kind)
        known.registry.checkpoints[name] = entry
    (told,) = tell(known, at_s=0).runs

    assert (told.checkpoints, told.checkpoint_bytes) == (2, 20)


def test_models_name_who_serves_them_by_pool():
    known = Known()
    for pool in ("", "fp8"):
        entry = registry.ServedModel(
            name=BASE, role="sampler", vocab_size=9, context_length=8, tokenizer_id="t", pool=pool
        )
        known.registry.served[pool] = entry
    known.pings.hear(alive("sampler-a", service="sampler", pool="fp8"))
    told = tell(known, at_s=0).models

    assert [(model.pool, model.instances) for model in told] == [("", ()), ("fp8", ("sampler-a",))]

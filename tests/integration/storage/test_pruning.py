"""Logs that a policy takes away, on a real broker: what holds them, what stays, and kills."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack

import pytest
import structlog
from msgspec import structs
from tests.integration.auditing import bus_of
from tests.integration.conftest import connect, start, stop
from tests.integration.contexts import context_of
from tests.integration.steps import new_model, step
from tests.integration.test_anchors import chain
from tests.integration.test_collecting import checkpoint
from tests.integration.test_forgetting import audit
from tests.integration.test_log_commands import write_run
from tests.unit.sampler.examples import prompt, sample

from tinsmith import ids, logs
from tinsmith.bus.samples import SampleAddress
from tinsmith.cli import log_commands
from tinsmith.config import BusConfig, Config
from tinsmith.errors import BrokerUnavailable, Gone, InvalidRequest, ServerError
from tinsmith.logbook import LogDamaged
from tinsmith.logbook.source import open_run
from tinsmith.messages import ops, registry, table, weights
from tinsmith.messages.base import GENESIS, encode
from tinsmith.messages.sampling import AdapterRef, SampleDigests, SampleRecord
from tinsmith_checkpointer import collecting
from tinsmith_checkpointer.collection import FREED, Collection
from tinsmith_checkpointer.config import CheckpointerConfig
from tinsmith_checkpointer.pruning import Pruner
from tinsmith_checkpointer.references import References
from tinsmith_checkpointer.retention import RetentionConfig
from tinsmith_checkpointer.upkeep import Upkeep

DAY_NS = 86400 * 10**9
MONTH = RetentionConfig(logs="30d")
PATIENCE_S = 90.0
STREAMS = (table.LOG_STREAM, table.SAMPLE_LOG_STREAM, table.LINEAGE_STREAM, table.CHUNK_STREAM)
SAID = "retention of logs: 30d after its session ended"


@pytest.fixture
def config(broker, tmp_path):
    made = Config(
        data_dir=tmp_path,
        bus=BusConfig(url=broker.url),
        origins={"bus.url": "test"},
        sections=(CheckpointerConfig(grace_s=1e-6), MONTH),
    )
    logs.configure(made.logs, service="gc", instance="gc")  # not to where the commands write
    return made


@pytest.fixture
def pruner(bus):
    return Pruner(bus, MONTH, structlog.get_logger(), instance="checkpointer-test")


async def register(bus, run, *, ended_days=31):
    """The run and its session, which ended so many days ago."""
    ended_ns = time.time_ns() - ended_days * DAY_NS
    session = registry.Session(
        session_id=ids.session_of(run), owner="o", created_ns=1, status="finished",
        ended_ns=ended_ns,
    )  # fmt: skip
    await bus.table(table.SESSIONS).put(session.session_id, session)
    entry = registry.Run(
        model_id=run, session_id=session.session_id, owner="o", created_ns=1, base_model="m",
        lora=ops.LoraShape(),
    )  # fmt: skip
    await bus.table(table.RUNS).put(ids.token(run), entry)
    await bus.table(table.METER).put("log", registry.MeterMark(stream_seq=10**9))
    return session


async def publish_weights(bus, run):
    """A lineage of the run, with a chunk and a head."""
    await bus.lineages.chunks.put(run, b"weights")
    opened = weights.LineageOpened(
        lineage_id=run, epoch=0, publisher_id="t", content="full", prev_blake3=GENESIS
    )
    await bus.lineages.take(opened)
    head = weights.LineageHead(
        lineage_id=run, epoch=1, version=1, root="r", full_version=1, stream_seq=1
    )
    await bus.table(table.LINEAGES).put(ids.token(run), head)


async def log_sample(bus, run):
    sampler = ids.sampler_id(ids.session_of(run), 0)
    request = sample(request_id=f"{sampler}:1", sampler_id=sampler, seq=1, prompt=prompt(4))
    digests = SampleDigests(prompt="d", prompt_length=4, sequences=())
    record = SampleRecord(run=run, request=request, digests=digests)
    await bus.samples.append(SampleAddress(run, sampler, 1), encode(record))


async def ended_run(bus, blobs, **ended):
    """One with all that the broker can have of a run."""
    run = await write_run(bus, blobs)
    await log_sample(bus, run)
    await publish_weights(bus, run)
    await register(bus, run, **ended)
    return run


async def entries_of(bus, run):
    """How many messages the streams have of the run, each."""
    token = ids.token(run)
    js = bus._connection[1]
    found = []
    for stream in STREAMS:
        info = await js.stream_info(stream, subjects_filter=">")
        found.append(sum(n for name, n in (info.state.subjects or {}).items() if token in name))
    return found


async def verified(config, run=None, head=""):
    return await log_commands.verify(config, run, is_all=run is None, head=head)


async def test_a_due_log_goes_and_what_it_was_stays_on_record(bus, blobs, config, pruner, capsys):
    run, other = await ended_run(bus, blobs), await ended_run(bus, blobs, ended_days=29)
    head = (await bus.log.head(run)).blake3
    before = await entries_of(bus, other)
    assert await entries_of(bus, run) == [10, 1, 1, 1]
    await pruner.go_round()

    assert await entries_of(bus, run) == [0, 0, 0, 0]
    assert await entries_of(bus, other) == before
    assert await bus.lineages.head(run) is None
    assert await bus.lineages.head(other) is not None
    mark = await bus.pruning.of(run)
    assert (mark.entries, mark.samples, mark.reason) == (10, 1, SAID)
    assert (mark.by, mark.head.blake3, mark.head.place) == ("checkpointer-test", head, "op.7")
    assert mark.is_removed
    assert (await chain(bus)).pruned == {run: structs.replace(mark, is_removed=False)}
    assert await verified(config, run, head[:16]) == 0
    told = capsys.readouterr().out
    assert f"{run}: pruned: its log was pruned by policy on 20" in told
    assert f"({SAID}), by checkpointer-test; it had 10 entries and 1 samples, the last" in told
    assert f"  last entry {head}\n" in told
    assert await verified(config) == 0
    assert f"{other}: verified" in capsys.readouterr().out


async def test_what_needs_the_log_says_why_it_is_not_there(
    bus, blobs, config, pruner, tmp_path, capsys
):
    run = await ended_run(bus, blobs)
    file = tmp_path / "run.tslog"
    await log_commands.export(config, run, file, overwrite=False, has_samples=False, has_key=True)
    await pruner.go_round()
    capsys.readouterr()
    span = log_commands.Span()

    with pytest.raises(Gone, match=f"{run}: its log was pruned by policy on 20"):
        async with open_run(run[:8], config):
            pass
    with pytest.raises(Gone, match="was pruned by policy"):
        await log_commands.show_samples(config, run, span, is_json=False)
    with pytest.raises(InvalidRequest, match=r"was pruned .* only the digest of that one is known"):
        await verified(config, run, "0" * 16)
    with pytest.raises(InvalidRequest, match=r"was pruned .* the file can be read by itself"):
        await log_commands.import_(config, file, resume=False)
    assert await log_commands.ls(config, None) == 0
    assert "  pruned on 20" in capsys.readouterr().out
    assert await verified(config, str(file)) == 0


async def nothing(bus, run):
    """It would be due."""


async def live_session(bus, run):
    session = await register(bus, run)
    alive = structs.replace(session, status="active", ended_ns=None)
    await bus.table(table.SESSIONS).put(session.session_id, alive)


async def saved(bus, run, **fields):
    made = structs.replace(checkpoint("x"), model_id=run, **fields)
    await bus.table(table.CHECKPOINTS).put("c", made)


async def copied(bus, run):
    await saved(bus, ids.model_id(ids.new_session_id(), 0), log_model_id=run)


async def expired(bus, run):
    await saved(bus, run, expires_ns=1)


async def drawn_from(bus, run, **fields):
    """In a session of its own that lives."""
    session = registry.Session(session_id=ids.new_session_id(), owner="o", created_ns=1)
    await bus.table(table.SESSIONS).put(session.session_id, session)
    entry = registry.Sampler(
        sampler_id=ids.sampler_id(session.session_id, 0), session_id=session.session_id, owner="o",
        created_ns=1, base_model="m", **fields,
    )  # fmt: skip
    await bus.table(table.SAMPLERS).put("s", entry)
    return session


async def by_path(bus, run):
    await drawn_from(bus, run, model_path=f"tinker://{run}/sampler_weights/x")


async def by_adapter(bus, run):
    await drawn_from(bus, run, adapter=AdapterRef(version="v", files={}, model_id=run))


async def by_lineage(bus, run):
    await drawn_from(bus, run, follows=run)


async def was_drawn_from(bus, run):
    session = await drawn_from(bus, run, follows=run)
    over = structs.replace(session, status="expired", ended_ns=1)
    await bus.table(table.SESSIONS).put(session.session_id, over)


async def placed(bus, run):
    place = ops.Placement(model_id=run, base_model="m")
    assert await bus.enqueue(table.PLACEMENTS, place, pool="p", model=ids.token(run))


async def asked(bus, run):
    op = ops.Op(model_id=run, seq=8, body=ops.OptimStep())
    assert await bus.enqueue(table.OPS, op, model=ids.token(run), seq="8")


async def uncounted(bus, run):
    await bus.table(table.METER).put("log", registry.MeterMark(stream_seq=1))


async def unregistered(bus, run):
    await bus.table(table.RUNS).delete(ids.token(run))


@pytest.mark.parametrize(
    ("befalls", "fate"),
    [
        (nothing, "due"),
        (live_session, "living"),
        (saved, "checkpoints"),
        (copied, "checkpoints"),
        (expired, "due"),
        (by_path, "samplers"),
        (by_adapter, "samplers"),
        (by_lineage, "samplers"),
        (was_drawn_from, "due"),
        (placed, "living"),
        (asked, "living"),
        (uncounted, "uncounted"),
        (unregistered, None),
    ],
)
async def test_a_log_is_pruned_only_when_nothing_needs_it(bus, blobs, pruner, befalls, fate):
    run = await ended_run(bus, blobs)
    await befalls(bus, run)
    plan = await pruner.plan()
    before = await entries_of(bus, run)
    await pruner.carry_out(plan)

    assert plan.fates.get(run) == fate
    assert await entries_of(bus, run) == ([0, 0, 0, 0] if fate == "due" else before)


async def test_without_a_policy_nothing_is_pruned_and_what_was_begun_is_ended(bus, blobs):
    begun, other = await ended_run(bus, blobs), await ended_run(bus, blobs)
    await bus.pruning.mark(begun, reason=SAID, by="checkpointer-before")
    lasting = Pruner(bus, RetentionConfig(), structlog.get_logger(), instance="checkpointer-now")
    await lasting.go_round()

    assert await entries_of(bus, begun) == [0, 0, 0, 0]
    assert await entries_of(bus, other) == [10, 1, 1, 1]
    assert (await bus.pruning.of(begun)).by == "checkpointer-before"


async def test_a_run_that_has_no_log_leaves_no_mark(bus, pruner):
    run = ids.model_id(ids.new_session_id(), 0)
    await register(bus, run)
    await pruner.go_round()

    assert await bus.pruning.marks() == {}


async def test_a_session_is_known_until_the_logs_of_its_runs_are_pruned(bus, blobs, config, pruner):
    """Its end decides when."""
    run = await ended_run(bus, blobs)
    context = context_of("checkpointer-test", bus, blobs, config)
    upkeep = Upkeep(context, CheckpointerConfig(session_days=0))
    sessions = bus.table(table.SESSIONS)
    for is_known in (True, False):
        async with AsyncExitStack() as stack:
            for view in (upkeep._sessions, upkeep._runs, upkeep._pruned, upkeep._keys):
                stack.push_async_callback((await view.watch()).close)
            await upkeep._end_sessions()
        assert (await sessions.get(ids.session_of(run)) is not None) == is_known
        await pruner.go_round()


async def test_anchoring_goes_on_where_the_newest_log_was_pruned(bus, blobs, config, pruner):
    first = await ended_run(bus, blobs, ended_days=1)
    newest = await ended_run(bus, blobs)
    await pruner.go_round()
    assert await bus.anchors.anchor() == 0
    await bus.log.take(first, "trainer-b")
    assert await bus.anchors.anchor() == 1
    found = await chain(bus)

    assert (found.length, found.damage, list(found.pruned)) == (3, None, [newest])
    assert [one.number for one in found.of(first)] == [1, 3], "nothing is anchored anew"
    assert await verified(config) == 0


async def test_a_broker_without_logs_is_anchored_and_verified(bus, blobs, config, pruner, capsys):
    run = await ended_run(bus, blobs)
    await pruner.go_round()

    assert await bus.anchors.anchor() == 0
    assert await verified(config) == 0
    assert f"{run}: pruned" in capsys.readouterr().out


async def test_a_mark_that_no_anchor_has_hides_no_cut(bus, blobs, config, capsys):
    """Who may write to the registry, but not purge by policy, says that it was one."""
    run = await ended_run(bus, blobs)
    await bus.anchors.anchor()
    await bus.pruning.mark(run, reason=SAID, by="nobody")
    subject = table.LOG_TEMPLATE.subject(model=ids.token(run), kind="*", number="*")
    await bus._connection[1].purge_stream(table.LOG_STREAM, subject=subject)

    assert await verified(config) == 1
    assert f"{run}: damaged: op 7: anchor: it is not there" in capsys.readouterr().out


async def test_an_anchor_that_tells_another_end_is_damaged(bus, blobs, config, pruner, capsys):
    run = await ended_run(bus, blobs)
    await bus.anchors.anchor()
    mark = await bus.pruning.mark(run, reason=SAID, by="t")
    await bus.anchors.note([structs.replace(mark, head=structs.replace(mark.head, blake3="0"))])

    assert isinstance((await chain(bus)).damage, LogDamaged)
    assert await verified(config) == 1
    told = capsys.readouterr().out
    assert f"anchors: damaged: anchor 2: pruned: the last entry of {run} is 0, but anchor 1" in told


class Killed(BaseException):
    """The process ends here."""


STEPS = ("_purge", "_marks.create", "_anchors.anchor", "_anchors.note", "_marks.put")
ASKED = 4  # streams that are asked whether they may be purged, before anything else


@pytest.mark.parametrize("last", [ASKED, ASKED + 1, ASKED + 2, ASKED + 3, ASKED + 6, ASKED + 7])
async def test_killed_after_any_step_it_is_done_by_the_next_one(
    bus, blobs, config, pruner, monkeypatch, last
):
    run, held = await ended_run(bus, blobs), await ended_run(bus, blobs)
    await saved(bus, held)
    before = await entries_of(bus, held)
    done = []

    def ends_after(name):
        owner, _, method = name.rpartition(".")
        target = getattr(bus.pruning, owner) if owner else bus.pruning
        real = getattr(target, method)

        async def step(*args, **kwargs):
            answer = await real(*args, **kwargs)
            done.append(name)
            if len(done) == last + 1:
                raise Killed
            return answer

        monkeypatch.setattr(target, method, step)

    for name in STEPS:
        ends_after(name)
    with pytest.raises(Killed):
        await pruner.go_round()
    monkeypatch.undo()

    assert await verified(config) == 0, "whatever is left, nothing is broken"
    await pruner.go_round()
    assert await entries_of(bus, run) == [0, 0, 0, 0]
    assert await entries_of(bus, held) == before
    assert (await bus.pruning.of(run)).entries == 10
    assert await verified(config) == 0
    assert (await pruner.plan()).begun == []


@pytest.mark.slow  # purges are waited for until it is clear that nobody answers
async def test_the_broker_dies_while_it_purges(broker, bus, blobs, config, pruner, monkeypatch):
    monkeypatch.setattr("tinsmith.bus.wire.READ_PATIENCE_S", 0.5)
    runs = [await write_run(bus, blobs, steps=40) for _ in range(3)]
    for run in runs:
        await register(bus, run)
    held = await ended_run(bus, blobs)
    await saved(bus, held)
    purge, purges = bus.pruning._purge, 0

    async def killed_in_the_midst(stream, subject):
        nonlocal purges
        purges += 1
        asked = asyncio.create_task(purge(stream, subject))
        if purges in (8, 12):  # the logs of the first run, and of the second or the first again
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.restart)
        await asked

    monkeypatch.setattr(bus.pruning, "_purge", killed_in_the_midst)
    async with asyncio.timeout(PATIENCE_S):
        while not (plan := await planned(pruner)) or plan.begun or plan.due:
            try:
                await pruner.go_round()
            except BrokerUnavailable:
                continue

    assert purges > 12
    assert [sum(await entries_of(bus, run)) for run in runs] == [0, 0, 0]
    assert await entries_of(bus, held) == [10, 1, 1, 1]
    assert await verified(config) == 0


async def planned(pruner):
    try:
        return await pruner.plan()
    except BrokerUnavailable:
        return None


async def test_a_stream_that_lets_nothing_be_purged_is_said_to(bus, blobs, pruner):
    run = await ended_run(bus, blobs)
    js = bus._connection[1]
    present = (await js.stream_info(table.LOG_STREAM)).config
    await js.update_stream(present.evolve(deny_purge=True))
    await bus.ensure()  # takes it as it is
    with pytest.raises(ServerError, match="TS_LOG on the broker lets nobody purge it"):
        await pruner.go_round()

    assert await bus.pruning.of(run) is None
    assert await entries_of(bus, run) == [10, 1, 1, 1]


async def test_blobs_that_only_a_pruned_log_needed_are_freed_by_who_has_read_it(bus, blobs, pruner):
    shared = await blobs.put(b"of a checkpoint and a state")
    run = await ended_run(bus, blobs)
    writer = await bus.log.writer(run)
    await writer.save_state(7, {"w": shared}, state_blake3="l")
    references = References(bus, None)
    collection = Collection(bus, blobs, references, grace_s=0.0)
    before = await collection.plan()
    await pruner.go_round()
    other = structs.replace(checkpoint("y"), model_id="m", parts={"w": shared})
    await bus.table(table.CHECKPOINTS).put("y", other)
    after = await collection.plan()

    assert before.of(*FREED) == []
    assert sorted(map(str, after.of(*FREED))) == sorted(
        str(ref) for refs in before.blobs.values() for ref in refs if ref != shared
    )
    assert after.of("checkpoints") == [shared]


async def test_the_command_explains_and_prunes(bus, blobs, config, capsys):
    due, held = await ended_run(bus, blobs), await ended_run(bus, blobs)
    await saved(bus, held)
    imported = await write_run(bus, blobs)
    await log_sample(bus, ids.session_of(imported))
    await ended_run(bus, blobs, ended_days=1)

    assert await collecting.main(config, is_dry=True, is_json=False) == 0
    rows = [line.split(maxsplit=6) for line in capsys.readouterr().out.splitlines()]
    counts = {row[1]: (row[0], row[2], row[5]) for row in rows if len(row) == 7}
    assert counts["due"] == ("prune", "13", "1")
    assert counts["checkpoints"] == ("keep", "13", "1")
    assert counts["policy"] == ("keep", "13", "1")
    assert counts["elsewhere"] == ("keep", "10", "1")
    assert counts["sessions"] == ("keep", "1", "1")
    assert await bus.pruning.marks() == {}

    assert await collecting.main(config, is_dry=False, is_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pruned_logs"] == 1
    assert list(await bus.pruning.marks()) == [due]
    assert await collecting.main(config, is_dry=True, is_json=True) == 0
    after = {one["name"]: one["logs"] for one in json.loads(capsys.readouterr().out)["logs"]}
    assert after == {"policy": 1, "checkpoints": 1, "elsewhere": 1, "sessions": 1, "due": 0}


async def test_what_came_after_a_log_was_pruned_is_told_and_taken(bus, blobs, config, capsys):
    """Such as a sample that was drawn when it went."""
    run = await ended_run(bus, blobs)
    await collecting.main(config, is_dry=False, is_json=True)
    await log_sample(bus, run)
    capsys.readouterr()
    await collecting.main(config, is_dry=False, is_json=True)
    report = json.loads(capsys.readouterr().out)

    assert {one["name"]: one["entries"] for one in report["logs"]} == {"due": 0, "pruned": 1}
    assert await entries_of(bus, run) == [0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_command_is_killed_again_and_again(bus, blobs, broker, config, tmp_path):
    runs = [await ended_run(bus, blobs) for _ in range(24)]
    held = await ended_run(bus, blobs)
    await saved(bus, held)
    environ = os.environ | {
        "TINSMITH_NATS_URL": broker.url,
        "TINSMITH_DATA_DIR": str(tmp_path),
        "TINSMITH_RETENTION__LOGS": "30d",
    }
    met = 0
    for wanted in (1, 12, 23):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinsmith", "gc"), env=environ, stdout=subprocess.DEVNULL
        )
        async with asyncio.timeout(PATIENCE_S):
            while process.returncode is None and len(await bus.pruning.marks()) < wanted:
                await asyncio.sleep(0.002)
        if process.returncode is None:
            met += 1
            process.kill()
        await process.wait()
        assert await verified(config) == 0
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tinsmith", "gc"), env=environ, stdout=subprocess.DEVNULL
    )
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0

    assert met >= 2, "kills in the midst of it"
    assert [sum(await entries_of(bus, run)) for run in runs] == [0] * 24
    assert await entries_of(bus, held) == [10, 1, 1, 1]
    assert await verified(config) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_prunes_what_was_never_saved_and_keeps_what_was(tmp_path, model_folder):
    extra = '[retention]\nlogs = "1s"\ncheck_s = 0.2\n[checkpointer]\nmeter_s = 0.2\n'
    server = start(tmp_path, model_folder=model_folder, extra=extra)
    clients = connect(server)
    client = next(clients)
    lost, kept = new_model(client, seed=1), new_model(client, seed=2)
    for model in (lost, kept):
        step(model)
    kept.save_state("x").result()
    next(clients, None)  # ends the session
    try:
        asyncio.run(until_pruned(server, lost.model_id))
        status, answer = server.post("retrieve_future", {"request_id": f"{lost.model_id}:1"})
        done = audit(server, "log", "verify", "--all")
        replayed = audit(server, "replay", lost.model_id)
    finally:
        stop(server)

    assert (status, "nothing is known of" in str(answer)) == (404, True), answer
    assert done.returncode == 0, done
    assert f"{lost.model_id}: pruned: its log was pruned by policy on 20" in done.stdout
    assert f"{kept.model_id}: verified" in done.stdout
    assert (replayed.returncode, "was pruned by policy on 20" in replayed.stderr) == (2, True)


async def until_pruned(server, model_id):
    async with asyncio.timeout(PATIENCE_S), bus_of(server) as bus:
        while (found := await bus.pruning.of(model_id)) is None or not found.is_removed:
            await asyncio.sleep(0.1)

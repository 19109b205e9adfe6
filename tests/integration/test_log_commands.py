"""`tinsmith log` against a real broker: logs as a trainer writes them, and what can befall them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from tests.integration.steps import new_model, step

from tinsmith import ids
from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus, Encoded
from tinsmith.bus.log import subject_of
from tinsmith.config import BusConfig, Config
from tinsmith.errors import InvalidRequest
from tinsmith.logbook import transfer
from tinsmith.logbook.broker import BrokerLogbook
from tinsmith.logbook.file import FileLogbook
from tinsmith.logbook.overview import overview
from tinsmith.messages import ops
from tinsmith.messages.base import GENESIS, BlobRef, encode
from tinsmith.paths import DataDir
from tinsmith.sealing import Seals

LORA = ops.LoraShape(rank=4)
STEPPED = ops.OptimStepDone(metrics={"grad_norm": 1.0})
EMPTY = ops.ForwardBackward(data=(), loss_fn="cross_entropy")
SCORED = ops.ForwardBackwardDone(logprobs=(), metrics={"loss:sum": 2.5})


@dataclass(frozen=True)
class Shown:
    code: int
    out: str
    err: str


async def installed(*args, **environ):
    """Run the command in an environment of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "tinsmith", "log", *map(str, args),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", **environ},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return Shown(process.returncode, out.decode(), err.decode())


async def log(bus, blobs, *args):
    """Run the command against the installation that ``bus`` and ``blobs`` are of."""
    return await installed(
        *args,
        TINSMITH_NATS_URL=bus._config.url,
        TINSMITH_BLOBS__URL=f"file://{blobs.where}",
    )


async def write_run(bus, blobs, *, steps=3, rate=0.1):
    """Creation, ``steps`` steps each with a pass before it, one of them large, a load, a state."""
    model = ids.model_id(ids.new_session_id(), 0)
    writer = await bus.log.take(model, "trainer-a", {"torch": "2.8", "base_model": "tiny/llama"})
    seq = 0

    async def commit(body, result, *, state="", is_large=False):
        nonlocal seq
        data = encode(ops.Op(model_id=model, seq=seq, body=body))
        ref = await blobs.put(data) if is_large else None
        await writer.commit(seq, Encoded(data, ref), result, state_blake3=state)
        seq += 1

    created = ops.CreateModelDone(model_id=model, lora=LORA)
    await commit(ops.CreateModel(base_model="tiny/llama", lora=LORA), created, state="s")
    for number in range(steps):
        await commit(EMPTY, SCORED, is_large=number == 1)
        await commit(ops.OptimStep(learning_rate=rate), STEPPED, state=f"s{number}")
    parts = {"adapter.safetensors": await blobs.put(f"weights of {model}".encode())}
    await writer.save_state(seq - 1, parts, state_blake3=f"s{steps - 1}")
    path = f"tinker://{model}/weights/x"
    await commit(ops.LoadWeights(path=path), ops.LoadWeightsDone(path=path, parts=parts), state="l")
    return model


@pytest.fixture
async def run(bus, blobs):
    return await write_run(bus, blobs)


@pytest.fixture
async def elsewhere(tmp_path):
    """Another installation: its bus and its blobs."""
    data = DataDir(tmp_path / "other")
    data.prepare()
    broker = Broker(data.nats, data.run)
    broker.start()
    store = BlobStore.open("", default=tmp_path / "other-blobs")
    async with Bus.connect(BusConfig(url=broker.url), name="other", blobs=store) as other:
        await other.ensure()
        yield other, store
    broker.kill()


async def stored(bus, model):
    return [data async for _, data in bus.log.stored(model)]


async def forge(bus, model, entry, *, subject=None):
    """Write to the stream past the writer, chained to the last entry unless it says to what."""
    if not entry.prev_blake3:
        head = (await bus.log.head(model)).blake3
        entry = msgspec.structs.replace(entry, prev_blake3=head)
    await bus._connection[1].publish(subject or subject_of(entry), encode(entry))


def record(model, seq, *, prev=""):
    op = encode(ops.Op(model_id=model, seq=seq, body=EMPTY))
    return ops.Record(
        model_id=model, seq=seq, epoch=1, op=op, op_blake3=blake3(op).hexdigest(),
        result=encode(SCORED), result_blake3=blake3(encode(SCORED)).hexdigest(), prev_blake3=prev,
    )  # fmt: skip


def blob_file(blobs, ref):
    return Path(blobs.where) / ref.blake3[:2] / ref.blake3[2:]


async def test_a_log_as_a_trainer_writes_it_verifies(bus, blobs, run):
    shown = await log(bus, blobs, "verify", run[:5])

    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"{run}: verified, 10 entries, 8 ops by 1 owner, 2 blobs of ")
    assert (await bus.log.head(run)).blake3 in shown.out


async def test_ls_has_a_row_for_every_run(bus, blobs, run):
    other = await write_run(bus, blobs, steps=1)
    _, *rows = (await log(bus, blobs, "ls")).out.splitlines()

    assert sorted(row.split()[0] for row in rows) == sorted([run, other])
    (row,) = (row for row in rows if row.startswith(run))
    assert row.split() == [run, "tiny/llama", "7", "1", (await bus.log.head(run)).blake3[:8]]


async def test_ls_reads_three_entries_of_a_run_however_long_it_is(bus, blobs, run, monkeypatch):
    def none(*_args, **_kwargs):
        pytest.fail("a log was read through")

    monkeypatch.setattr(bus.log, "stored", none)
    book = BrokerLogbook(bus, blobs, Seals(bus, Config()))

    assert [type(entry.entry) for entry in await book.newest(run)] == [
        ops.Owned,
        ops.StateSaved,
        ops.Record,
    ]
    assert (await overview(book, run)).last_op == 7


async def test_ls_has_imported_runs(bus, blobs, run, elsewhere, tmp_path):
    await log(bus, blobs, "export", run, tmp_path / "run.tslog")
    await log(*elsewhere, "import", tmp_path / "run.tslog")
    _, row = (await log(*elsewhere, "ls")).out.splitlines()

    assert row.split()[:4] == [run, "tiny/llama", "7", "1"]


async def test_show_tells_what_was_done(bus, blobs, run):
    shown = await log(bus, blobs, "show", run, "--json", "--from", "3", "--to", "4")
    first, second = map(json.loads, shown.out.splitlines())

    assert (first["seq"], first["kind"]) == (3, "forward_backward")
    assert first["details"]["metrics"] == {"loss:sum": 2.5}
    assert second["details"] == {"learning_rate": 0.1, "metrics": {"grad_norm": 1.0}}


@pytest.mark.parametrize(
    ("change", "problem"), [(lambda b: b[:-1] + b"?", "damaged"), (lambda b: None, "is not in")]
)
async def test_a_blob_that_is_damaged_or_gone_is_named_with_its_op(
    bus, blobs, run, change, problem
):
    path = blob_file(blobs, (await bus.log.get(run, 3)).op_ref)
    content = change(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    shown = await log(bus, blobs, "verify", run)

    assert shown.code == 1
    assert f"{run}: damaged: entry 5 (op 3): op_ref: blob " in shown.out
    assert problem in shown.out


async def test_a_part_of_a_saved_state_that_is_gone_is_named(bus, blobs, run):
    saved = await bus.log.newest_state(run)
    blob_file(blobs, saved.parts["adapter.safetensors"]).unlink()
    shown = await log(bus, blobs, "verify", run)

    assert shown.code == 1
    assert "entry 9 (state after op 6): parts['adapter.safetensors']: blob " in shown.out


async def test_an_entry_that_does_not_follow_is_named(bus, blobs, run):
    await forge(bus, run, record(run, 8, prev=GENESIS))
    shown = await log(bus, blobs, "verify", run)

    assert shown.code == 1
    assert f"{run}: damaged: entry 11 (op 8): prev_blake3: {GENESIS} is not " in shown.out


async def test_an_op_under_another_ops_subject_is_named(bus, blobs, run):
    await forge(bus, run, record(run, 8), subject=f"tinsmith.v1.log.{ids.token(run)}.op.9")
    shown = await log(bus, blobs, "verify", run)

    assert shown.code == 1
    assert "entry 11 (op 8): subject: stored under " in shown.out


async def test_an_entry_that_cannot_be_read_is_named(bus, blobs, run):
    subject = f"tinsmith.v1.log.{ids.token(run)}.op.8"
    await bus._connection[1].publish(subject, b"\xc1")
    shown = await log(bus, blobs, "verify", run)

    assert shown.code == 1
    assert f"entry 11 ({subject}): entry: not an entry" in shown.out


async def test_verify_all_names_the_bad_ones_among_the_good(bus, blobs, run):
    good = await write_run(bus, blobs)
    await forge(bus, run, record(run, 9))
    shown = await log(bus, blobs, "verify", "--all")

    assert shown.code == 1
    assert f"{good}: verified" in shown.out
    assert f"{run}: damaged: entry 11 (op 9): seq: 9 cannot come here; the next is 8" in shown.out


async def test_a_kept_digest_stays_valid_while_the_run_goes_on(bus, blobs, run):
    kept = (await bus.log.head(run)).blake3
    await forge(bus, run, record(run, 8))

    for told in (kept, kept[:24]):
        assert (await log(bus, blobs, "verify", run, "--head", told)).code == 0
    shown = await log(bus, blobs, "verify", run, "--head", "0" * 64)
    assert (shown.code, "its end was cut off" in shown.out) == (1, True)


async def test_an_unknown_run_is_exit_code_2_and_one_line(bus, blobs, run):
    shown = await log(bus, blobs, "verify", "0")

    assert (shown.code, shown.out) == (2, "")
    assert shown.err == (
        f"tinsmith log verify: error: run: no run begins with '0'; there are {run}\n"
    )


async def test_a_broker_without_tinsmith_is_said_to_be_one(tmp_path, blobs, broker):
    async with Bus.connect(BusConfig(url=broker.url), name="bare", blobs=blobs) as bare:
        shown = await log(bare, blobs, "ls")

    assert shown.code == 2
    assert "no stream TS_LOG: no service of Tinsmith has run against it yet" in shown.err


async def test_the_broker_of_a_running_up_is_found_by_its_data_folder(bus, blobs, run, tmp_path):
    folder = tmp_path / "installed"
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "up.json").write_text(json.dumps({"nats_url": bus._config.url}))
    blobs_url = f"file://{blobs.where}"
    shown = await installed("verify", run, "--data-dir", folder, TINSMITH_BLOBS__URL=blobs_url)

    assert (shown.code, "verified" in shown.out) == (0, True)


async def test_a_run_is_the_same_after_export_and_import_elsewhere(
    bus, blobs, run, elsewhere, tmp_path
):
    path = tmp_path / "run.tslog"
    exported = await log(bus, blobs, "export", run, path)
    imported = await log(*elsewhere, "import", path)
    other, _ = elsewhere

    assert (exported.code, imported.code) == (0, 0)
    assert await stored(other, run) == await stored(bus, run)
    assert await other.log.op(await other.log.get(run, 3)) == await bus.log.op(
        await bus.log.get(run, 3)
    )
    assert (await log(*elsewhere, "verify", "--all")).code == 0
    assert (await log(*elsewhere, "diff", run, path)).out == "equal: 8 ops\n"


async def test_an_imported_run_can_be_taken_and_gone_on_with(bus, blobs, run, elsewhere, tmp_path):
    """What replay and recovery need: the log is one like any other."""
    await log(bus, blobs, "export", run, tmp_path / "run.tslog")
    await log(*elsewhere, "import", tmp_path / "run.tslog")
    writer = await elsewhere[0].log.take(run, "trainer-b")

    assert writer.epoch == 2
    assert (await log(*elsewhere, "verify", run)).code == 0


async def test_a_file_that_does_not_verify_is_not_imported(bus, blobs, run, elsewhere, tmp_path):
    path = tmp_path / "run.tslog"
    await log(bus, blobs, "export", run, path)
    path.write_bytes(path.read_bytes()[:-1])
    shown = await log(*elsewhere, "import", path)

    assert shown.code == 1
    assert "after entry 10 (op 7)" in shown.err
    assert await elsewhere[0].log.models() == []


async def test_a_run_that_is_there_is_not_imported_again(bus, blobs, run, tmp_path):
    path = tmp_path / "run.tslog"
    await log(bus, blobs, "export", run, path)
    before = await stored(bus, run)
    shown = await log(bus, blobs, "import", path)

    assert shown.code == 2
    assert f"{run} has a log here already, of 10 entries" in shown.err
    assert await stored(bus, run) == before


async def test_an_import_that_broke_off_is_continued(bus, blobs, run, elsewhere, tmp_path):
    path = tmp_path / "run.tslog"
    await log(bus, blobs, "export", run, path)
    await break_off(path, run, elsewhere, after=4)
    refused = await log(*elsewhere, "import", path)
    resumed = await log(*elsewhere, "import", path, "--resume")

    assert (refused.code, resumed.code) == (2, 0)
    assert await stored(elsewhere[0], run) == await stored(bus, run)


async def break_off(path, run, elsewhere, *, after):
    """As a kill would end an import."""
    left = iter(range(after - 1))
    bus, _ = elsewhere
    with FileLogbook.open(path) as book:
        importing = transfer.Import(*_parts(elsewhere), on_entry=lambda: next(left))
        with pytest.raises(RuntimeError):  # what a StopIteration in a coroutine becomes
            await importing.run(book, run, resume=False)
    assert len(await stored(bus, run)) == after


async def test_a_log_that_took_another_way_is_not_continued(bus, blobs, run, elsewhere, tmp_path):
    path = tmp_path / "run.tslog"
    await log(bus, blobs, "export", run, path)
    await elsewhere[0].log.take(run, "someone-else")
    with FileLogbook.open(path) as book, pytest.raises(InvalidRequest, match="from entry 1 on"):
        await transfer.Import(*_parts(elsewhere), on_entry=lambda: None).run(book, run, resume=True)


def _parts(elsewhere):
    bus, blobs = elsewhere
    return bus.log, blobs, Seals(bus, Config())


async def test_an_export_of_a_damaged_log_leaves_no_file(bus, blobs, run, tmp_path):
    await forge(bus, run, record(run, 9))
    folder = tmp_path / "out"
    folder.mkdir()
    shown = await log(bus, blobs, "export", run, folder / "run.tslog")

    assert shown.code == 1
    assert "entry 11 (op 9): seq" in shown.err
    assert os.listdir(folder) == []


async def test_diff_finds_where_two_runs_part(bus, blobs, run):
    other = await write_run(bus, blobs, rate=0.2)
    shown = await log(bus, blobs, "diff", run, other)

    assert shown.code == 1
    assert shown.out == ("2 ops are equal; op 2 differs:\n  op.learning_rate: 0.1 in A, 0.2 in B\n")


async def test_a_reference_that_is_no_name_of_a_blob_is_not_followed(bus, blobs, run):
    """A log from elsewhere must not make the store look at other files."""
    parts = {"x": BlobRef("../../../etc/hostname", 1)}
    saved = ops.StateSaved(
        model_id=run, seq=7, epoch=1, state_blake3="l", parts=parts, prev_blake3=""
    )
    await forge(bus, run, saved)
    shown = await log(bus, blobs, "verify", run)

    assert shown.code == 1
    assert "parts['x']: blob '../../../etc/hostname': not the name of a blob" in shown.out


async def test_the_log_of_a_real_run_verifies_and_travels(client, server, tmp_path):
    """Training, saving, loading, sampling and a request that fails, as the services log them."""
    model = await asyncio.to_thread(train, client)
    place = {"TINSMITH_DATA_DIR": str(server.folder / "data")}
    shown = await installed("verify", model, **place)
    path = tmp_path / "run.tslog"
    await installed("export", model, path, **place)

    assert shown.code == 0
    assert f"{model}: verified, " in shown.out
    assert (await installed("verify", path)).out.splitlines()[1] == shown.out.splitlines()[1]
    kinds = (await installed("show", path)).out
    for kind in ("create_model", "optim_step", "save_weights_for_sampler", "load_weights"):
        assert f" {kind} " in kinds


def train(client):
    model = new_model(client)
    for _ in range(2):
        step(model)
    path = model.save_state("audited").result().path
    model.save_weights_for_sampler("sampled").result()
    with pytest.raises(Exception, match="audited"):
        model.save_state("audited").result()
    model.load_state(path).result()
    step(model)
    return model.model_id

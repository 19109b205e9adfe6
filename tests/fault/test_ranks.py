"""A trainer of two ranks: when either of them is killed both are gone, and the run goes on.

Once it is started by itself, and once by torchrun, with the base in shards.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.fault.cluster import PATIENCE_S, READY_PATIENCE_S, last_state, records, until
from tests.integration.conftest import MODEL
from tests.integration.steps import RANK, datum, new_model
from tinker import types as T

from tinsmith.messages import ops

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are found, and end, as on Linux"),
]

BATCHES = ([60] * 40, [30], [64, 3, 20])
"""Lengths of datums: many passes to be killed in, and fewer datums than ranks."""
TRAINER = 'ranks = 2\nmicrobatch_tokens = 64\ndevice = "cpu"\nthreads = 1\n'


def followers(trainer):
    """The processes that it has started."""
    pid = trainer.process.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


def send_steps(model):
    """Steps that were promised and not waited for."""
    promised = []
    for lengths in BATCHES:
        data = [datum(range(5 + n % 7, 5 + n % 7 + n)) for n in lengths]
        promised.append(model.forward_backward(data, "cross_entropy"))
        promised.append(model.optim_step(T.AdamParams(learning_rate=1e-2)))
    return promised


def has_state(entries):
    return any(isinstance(entry, ops.StateSaved) for entry in entries)


def losses(promised):
    return [future.result().metrics["loss:sum"] for future in promised[::2]]


def test_a_run_goes_on_after_the_death_of_any_rank(new_cluster, clients):
    cluster = new_cluster(trainer=TRAINER)
    gateway, trainer = cluster.start("gateway", "trainer")
    client = clients(cluster.server(gateway))
    killed, spared = new_model(client), new_model(client)
    found = []
    for is_first in (False, True):
        (second,) = followers(trainer)
        promised = send_steps(killed)
        promised[0].result()  # so that the rest is under way
        os.kill(trainer.process.pid if is_first else second, signal.SIGKILL)
        until(lambda: not trainer.is_running and is_gone(second), "both")  # noqa: B023
        assert trainer.process.returncode == (-signal.SIGKILL if is_first else 1)
        (trainer,) = cluster.start("trainer")
        found.append(losses(promised))
    assert found == [losses(send_steps(spared)) for _ in range(2)]
    seqs = [record.seq for record in records(cluster.log(killed.model_id))]
    assert seqs == list(range(13))

    ends = {last_state(cluster.log(model.model_id)) for model in (killed, spared)}
    assert len(ends) == 1
    code, heard = cluster.audit("replay", killed.model_id)  # by one process
    assert code == 0, heard
    assert "compared 13 results and 7 states" in heard


def test_slices_of_what_is_trained_whole_are_rebuilt_after_the_death_of_any_rank(
    new_cluster, clients
):
    """And go on with a trainer of one rank, which has none."""
    cluster = new_cluster(trainer=TRAINER)
    config = cluster.config.read_text()
    cluster.config.write_text(config.replace("[gateway]", "full = true\n[gateway]", 1))
    sliced = {"model": f"{MODEL}:full", "sharding": "weights", "snapshot_steps": 1}
    gateway, _ = cluster.start("gateway", "checkpointer")
    (trainer,) = cluster.start("trainer", **sliced)
    client = clients(cluster.server(gateway))
    model = client.create_lora_training_client(sliced["model"], rank=RANK).result()
    for is_first in (False, True):
        (second,) = followers(trainer)
        promised = send_steps(model)
        promised[0].result()  # so that the rest is under way
        if is_first:
            until(lambda: has_state(cluster.log(model.model_id)), "a saved state")
        os.kill(trainer.process.pid if is_first else second, signal.SIGKILL)
        until(lambda: not trainer.is_running and is_gone(second), "both")  # noqa: B023
        assert trainer.process.returncode == (-signal.SIGKILL if is_first else 1)
        (trainer,) = cluster.start("trainer", **sliced)
        losses(promised)
    until(lambda: trainer.events("state restored"), "the last owner to begin with one")
    model.save_state("end").result()
    trainer.process.terminate()
    assert trainer.process.wait(PATIENCE_S) == 0
    cluster.start("trainer", **sliced | {"ranks": 1, "sharding": "none"})
    losses(send_steps(model))

    code, heard = cluster.audit("replay", model.model_id)  # by one process
    assert code == 0, heard
    assert "compared 20 results and 10 states" in heard


def test_ranks_start_and_stop_together(new_cluster, clients):
    cluster = new_cluster(trainer=TRAINER)
    refused, ready = cluster.begin("trainer", mixing="mixed")
    os.close(ready)
    gateway, trainer = cluster.start("gateway", "trainer")
    (second,) = followers(trainer)
    losses(send_steps(new_model(clients(cluster.server(gateway)))))
    trainer.process.terminate()

    assert trainer.process.wait(PATIENCE_S) == 0
    assert is_gone(second)
    assert refused.process.wait(PATIENCE_S) == 2
    assert "trainer.mixing: passes of 2 ranks are one model's each" in refused.log.read_text()


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "9")


def workers(torchrun):
    """The ranks that torchrun runs now, by rank; empty while it has none."""
    found = {}
    for pid in followers(torchrun):
        with suppress(OSError):
            said = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [int(one.removeprefix(b"RANK=")) for one in said if one.startswith(b"RANK=")]
            found |= dict.fromkeys(ranks, pid)
    return found


def test_torchrun_starts_all_ranks_again_when_one_has_died(new_cluster, clients):
    cluster = new_cluster(trainer=TRAINER.replace("ranks = 2", 'sharding = "weights"'))
    (gateway,) = cluster.start("gateway")
    torchrun = cluster.run([*TORCHRUN, "-m", "tinsmith", "trainer"], "torchrun")
    until(lambda: torchrun.events("ready"), "the first start", READY_PATIENCE_S)
    client = clients(cluster.server(gateway))
    killed, spared = new_model(client), new_model(client)
    before = workers(torchrun)
    promised = send_steps(killed)
    promised[0].result()  # so that the rest is under way
    os.kill(before[1], signal.SIGKILL)
    until(lambda: all(map(is_gone, before.values())), "the end of both")

    assert losses(promised) == losses(send_steps(spared))
    assert len({last_state(cluster.log(model.model_id)) for model in (killed, spared)}) == 1
    after = workers(torchrun)
    assert after.keys() == {0, 1}
    torchrun.process.terminate()
    until(lambda: all(map(is_gone, after.values())), "the end of all")
    assert torchrun.events("stopped")[-1]["instance"] == torchrun.instance

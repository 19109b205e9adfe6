"""Each check with facts made up, good and bad."""

from __future__ import annotations

import gc
import json
import os
import socket
from types import SimpleNamespace

import msgspec
import pytest
from tests import model_folder

from tinsmith import memory
from tinsmith.bus.books import BrokerState, StreamState
from tinsmith.config import Config, ModelConfig, load
from tinsmith.doctor import broker, graphics, machine, models, network, storage
from tinsmith.doctor.finding import Subject, fail

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder.build(tmp_path_factory.mktemp("model"))


@pytest.fixture
def subject(tmp_path, folder):
    def made(**environ):
        loaded = load(None, {"HOME": str(tmp_path), "TINSMITH_DATA_DIR": str(tmp_path), **environ})
        model = ModelConfig(name="tiny/llama", path=str(folder))
        return Subject(
            Config(
                data_dir=loaded.data_dir, bus=loaded.bus, blobs=loaded.blobs, models=(model,),
                sections=loaded.sections, origins=loaded.origins,
            ),
            environ,
        )  # fmt: skip

    return made


def with_model(subject, **changes):
    (model,) = subject.config.models
    changed = msgspec.structs.replace(model, **changes)
    given = subject.config
    config = Config(data_dir=given.data_dir, models=(changed,), sections=given.sections)
    return Subject(config, subject.environ)


def test_versions_are_compared_by_their_numbers():
    assert machine.numbers("2.10.0+cpu") > machine.numbers("2.9")
    assert machine.numbers("0.15rc1") == (0, 15)


def test_packages_name_what_a_service_lacks(monkeypatch, subject):
    wanted = [
        "typer>=99", "absent-one>=1; extra == 'trainer'", "rich>=1",
        "uvloop>=99; sys_platform != 'win32'",
    ]  # fmt: skip
    monkeypatch.setattr(machine.metadata, "requires", lambda _: wanted[1:3])

    found = machine.packages(subject())
    assert (found.level, found.remedy) == (
        "warn",
        "where they are to run: pip install 'tinsmith[trainer]'",
    )
    monkeypatch.setattr(machine.metadata, "requires", lambda _: wanted)
    found = machine.packages(subject())
    assert found.level == "fail"
    assert "99 or newer is needed" in found.says


def test_memory_is_measured_against_the_weights(monkeypatch, subject):
    need = subject().models[0][1].files.weight_bytes("float32")
    levels = []
    for free in (need - 1, need + 1, 2 * need):
        monkeypatch.setattr(memory, "available_bytes", lambda free=free: free)
        levels.append(machine.main_memory(subject()).level)

    assert levels == ["fail", "warn", "ok"]


def test_more_threads_than_cores(subject):
    assert machine.cores(subject(TINSMITH_TRAINER__THREADS="1000")).level == "warn"
    assert machine.cores(subject()).level == "ok"


def test_a_full_disk(monkeypatch, subject):
    levels = []
    for free in (1 << 20, GIB, 100 * GIB):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, usage=usage: usage)
        levels.append(machine.disk(subject()).level)

    assert levels == ["fail", "warn", "ok"]


LISTED = "NVIDIA H200, 570.86, 143771, 140000\nNVIDIA H200, 570.86, 143771, [N/A]\n"


def test_the_list_of_gpus_is_read():
    first, second = graphics.parse(LISTED + "garbage\n")

    assert (first.name, first.driver, first.free >> 20) == ("NVIDIA H200", "570.86", 140000)
    assert second.free == 0


def test_a_gpu_that_is_asked_for_and_not_there(monkeypatch, subject):
    monkeypatch.setattr(graphics, "look", lambda: ([], "there is no nvidia-smi"))

    assert graphics.gpu(subject()).level == "ok"
    found = graphics.gpu(subject(TINSMITH_TRAINER__DEVICE="cuda"))
    assert found.level == "fail"
    assert "trainer.device" in found.says


@pytest.mark.parametrize(
    ("torch", "level"),
    [
        (("2.9.0+cpu", None), "warn"),
        (("2.9.0", 13), "fail"),
        (("2.9.0", 12), "ok"),
        (("", None), "ok"),
    ],
)
def test_driver_and_torch_must_go_together(monkeypatch, subject, torch, level):
    monkeypatch.setattr(graphics, "look", lambda: (graphics.parse(LISTED), ""))
    monkeypatch.setattr(graphics, "torch_build", lambda: torch)

    assert graphics.gpu(subject()).level == level


def test_shards_need_only_their_part_of_each_gpu(monkeypatch, subject):
    need = subject().models[0][1].files.weight_bytes("float32")
    small = graphics.Gpu("small", "570.86", total=need - 1, free=need - 1)
    monkeypatch.setattr(graphics, "look", lambda: ([small, small], ""))
    monkeypatch.setattr(graphics, "torch_build", lambda: ("", None))
    ranks = {"TINSMITH_TRAINER__RANKS": "2"}

    assert graphics.gpu(subject(**ranks)).level == "fail"
    assert graphics.gpu(subject(**ranks, TINSMITH_TRAINER__SHARDING="weights")).level == "ok"


def test_ranks_share_the_state_of_a_model_that_is_trained_whole(monkeypatch, subject):
    files = subject().models[0][1].files
    need = 2 * files.weight_bytes("float32") + files.state_bytes(8)
    card = graphics.Gpu("small", "570.86", total=need, free=need)
    monkeypatch.setattr(graphics, "look", lambda: ([card] * 8, ""))
    monkeypatch.setattr(graphics, "torch_build", lambda: ("", None))
    ranks = {"TINSMITH_TRAINER__RANKS": "8"}
    found = [
        graphics.gpu(with_model(subject(**environ), full=True))
        for environ in (ranks, ranks | {"TINSMITH_TRAINER__SHARDING": "weights"})
    ]

    assert [one.level for one in found] == ["fail", "ok"]
    assert "training all weights of tiny/llama takes" in found[0].says


def test_nvidia_smi_that_fails_is_told(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'driver mismatch' >&2\nexit 18\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert graphics.look() == ([], "nvidia-smi fails: driver mismatch")


def test_the_blob_store_is_used(subject):
    assert "first start" in storage.blob_store(subject()).says
    subject().data.blobs.mkdir()
    assert storage.blob_store(subject()).level == "ok"
    blocked = subject(TINSMITH_BLOBS__URL="file:///dev/null/nowhere")
    assert storage.blob_store(blocked).level == "fail"


def test_a_master_key_that_others_can_read(subject):
    file = subject().data.master_key
    assert storage.master_key(subject()).level == "ok"
    file.write_text("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n")
    file.chmod(0o644)
    found = storage.master_key(subject())
    assert (found.level, found.remedy) == ("fail", f"chmod 600 {file}")
    file.chmod(0o600)
    assert storage.master_key(subject()).level == "ok"
    file.write_text("short")
    assert storage.master_key(subject()).level == "fail"
    command = subject(TINSMITH_SEALING__MASTER_KEY_COMMAND="false")
    assert "exit code 1" in storage.master_key(command).says


def test_a_port_is_free_taken_or_ours(subject):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = subject(TINSMITH_GATEWAY__PORT=str(port))
        found = network.ports(asked)
        assert found.level == "fail"
        assert str(port) in found.says
        up = asked.data.up_file
        up.parent.mkdir(exist_ok=True)
        up.write_text(json.dumps({"base_url": f"http://127.0.0.1:{port}", "metrics": {}}))
        assert "in use by this installation" in network.ports(asked).says


def test_a_port_for_metrics_of_each_process(subject):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        last = taken.getsockname()[1]
        asked = subject(TINSMITH_GATEWAY__PORT="0", TINSMITH_METRICS__PORT=str(last - 3))

        found = network.ports(asked)
    assert found.level == "fail"
    assert "metrics.port" in found.says


def test_no_finding_tells_a_secret():
    found = fail("broker", "nats://secret@host:1 is away", "try nats://u:secret@host:1")

    assert "secret" not in found.says + found.remedy


def seen(state=None, streams=(), **changes):
    known = {
        "version": "2.12.0", "rtt_s": 0.001, "skew_s": 0.0, "storage": 1, "max_storage": 0,
        "max_payload": 8 << 20,
    }  # fmt: skip
    return broker.Seen(BrokerState(**known | changes), list(streams))


@pytest.mark.parametrize(
    ("changes", "level", "word"),
    [
        ({}, "ok", "first start"),
        ({"version": "2.11.9"}, "fail", "2.12 or newer"),
        ({"max_payload": 1000}, "fail", "max_payload"),
        ({"max_payload": 1 << 20}, "warn", "max_payload"),
        ({"storage": 95, "max_storage": 100}, "warn", "95% full"),
        ({"skew_s": 3.0}, "warn", "+3.0 s"),
    ],
)
def test_what_the_broker_says(changes, level, word):
    found = broker.judged("nats://b", seen(**changes))

    assert found.level == level
    assert word in found.says


def test_a_queue_that_is_nearly_full():
    full = StreamState("TS_OPS", 1, 95, 100, 0.0, 0, 1)

    assert "nearly full: TS_OPS" in broker.judged("nats://b", seen(streams=[full])).says


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_broker_that_does_not_answer(subject):
    assert broker.answering(subject()).level == "ok"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        found = broker.answering(
            subject(TINSMITH_NATS_URL=url, TINSMITH_BUS__CONNECT_TIMEOUT_S="1")
        )

    gc.collect()  # of the connection that never came about, within this test
    assert found.level == "fail"
    assert url in found.says


def test_a_program_that_is_no_nats_server(subject, tmp_path):
    script = tmp_path / "nats-server"
    script.write_text("#!/bin/sh\necho 'nats-server: v2.9.1'\n")
    script.chmod(0o755)

    assert "2.12 or newer" in broker.server_program(subject(NATS_SERVER_BIN=str(script))).says
    assert broker.server_program(subject(TINSMITH_NATS_URL="nats://b")).level == "ok"


def test_a_model_that_is_whole_and_one_that_is_not(subject, folder, tmp_path):
    (found,) = models.models(subject())
    assert found.level == "ok"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (found,) = models.models(with_model(subject(), path=str(copy)))
    assert "model.safetensors is cut off" in found.says
    weights.unlink()
    (found,) = models.models(with_model(subject(), path=str(copy)))
    assert (found.level, "lacks model.safetensors" in found.says) == ("fail", True)


def test_an_index_names_a_shard_that_is_not_there(subject, folder, tmp_path):
    copy = tmp_path / "sharded"
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (found,) = models.models(with_model(subject(), path=str(copy)))

    assert "lacks model-00001-of-00002.safetensors" in found.says


def test_a_model_that_only_the_hub_has(subject):
    (found,) = models.models(with_model(subject(), name="org/none", path=""))

    assert (found.level, "not on this machine" in found.says) == ("warn", True)


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_a_copy_in_the_hubs_cache_is_found(subject, tmp_path, variable, below):
    kept = tmp_path / "cache" / below / "models--org--none" / "snapshots" / "abc"
    model_folder.build(kept)
    asked = with_model(subject(**{variable: str(tmp_path / "cache")}), name="org/none", path="")
    (found,) = models.models(asked)

    assert (found.level, str(kept) in found.says) == ("ok", True)


def test_a_context_beyond_the_models_own(subject):
    (found,) = models.models(with_model(subject(), context_length=1 << 20))

    assert found.level == "warn"


def test_the_interpreter_of_sglang(monkeypatch, subject, tmp_path):
    requires = ["rich>=1", "sglang==0.5.23; extra == 'sglang'"]
    monkeypatch.setattr(models.metadata, "requires", lambda _: requires)
    assert models.sglang(subject()) is None
    absent = with_model(
        subject(), sampler={"engine": "sglang", "sglang_python": str(tmp_path / "python")}
    )
    assert models.sglang(absent).level == "fail"
    script = tmp_path / "python3"
    script.write_text("#!/bin/sh\necho 0.0.1\n")
    script.chmod(0o755)
    older = with_model(subject(), sampler={"engine": "sglang", "sglang_python": str(script)})
    assert "has SGLang 0.0.1" in models.sglang(older).says
    own = with_model(subject(), sampler={"engine": "sglang", "sglang_url": "http://h:1"})
    assert models.sglang(own).level == "ok"

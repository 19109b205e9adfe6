"""The supervisor over real, tiny processes."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import pytest

from tinsmith.cli.output import LogStream
from tinsmith.cli.process import ServiceProcess
from tinsmith.cli.supervisor import Timing, _Life, supervise
from tinsmith.errors import StartupError

QUICK = Timing(
    first_pause_s=0.01,
    longest_pause_s=0.02,
    stop_s=(1.0, 2.0, 3.0),
    hurried_stop_s=(0.5, 1.0, 1.5),
)
READY = """echo '{"ready": {"url": "here"}}' >&$TINSMITH_READY_FD"""
SERVE = f"{READY}; exec sleep 100"


@pytest.fixture
def text():
    return io.StringIO()


@pytest.fixture
def log(text):
    return LogStream(text, ["up", "a", "b", "c"], is_json=False, has_colors=False)


def shell(label, script, rank=0):
    return ServiceProcess(label, ["/bin/bash", "-c", script], dict(os.environ), rank=rank)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_processes_are_up_when_all_have_said_so(log):
    async with supervise(log, QUICK) as supervisor:
        assert await supervisor.bring_up([shell("a", SERVE), shell("b", SERVE)])

        assert supervisor.ready == {"a": {"url": "here"}, "b": {"url": "here"}}


async def test_nothing_is_left_when_the_block_ends(log):
    async with supervise(log, QUICK) as supervisor:
        await supervisor.bring_up([shell("a", SERVE), shell("b", SERVE, rank=1)])
        pids = supervisor.pids.values()

    assert not any(map(is_alive, pids))


async def test_output_of_both_kinds_is_in_the_log(log, text):
    async with supervise(log, QUICK) as supervisor:
        await supervisor.bring_up([shell("a", f"echo out; echo err >&2; {SERVE}")])

    assert "a  | out\n" in text.getvalue()
    assert "a  | err\n" in text.getvalue()


async def test_a_wait_is_mentioned(log, text):
    async with supervise(log, Timing(notice_s=0.05)) as supervisor:
        waiting = asyncio.create_task(supervisor.bring_up([shell("a", "exec sleep 100")]))
        await until(lambda: "waiting for a (0 s)" in text.getvalue())
        supervisor.request_stop()

        assert await waiting is False


async def test_a_crashed_process_is_started_again(log):
    ready_again = asyncio.Event()
    async with supervise(log, QUICK) as supervisor:
        await supervisor.bring_up([shell("a", SERVE)])
        first = supervisor.pids["a"]
        supervisor.on_ready = ready_again.set
        os.kill(first, signal.SIGKILL)
        await asyncio.wait_for(ready_again.wait(), 10)

        assert supervisor.pids["a"] != first


async def run_until_stopped(log, *processes, on_ready=None):
    async with supervise(log, QUICK) as supervisor:
        supervisor.on_ready = on_ready
        if await supervisor.bring_up(processes):
            await supervisor.stopping.wait()


async def test_a_start_up_error_ends_everything_with_its_own_line(log):
    failing = shell("a", "echo 'tinsmith gateway: error: port 1 is taken' >&2; exit 2")
    other = shell("b", SERVE)
    with pytest.raises(StartupError, match=r"^a: port 1 is taken$"):
        await run_until_stopped(log, failing, other)

    assert not is_alive(other.pid)


async def test_a_start_up_error_after_it_was_ready_is_only_a_crash(log, tmp_path):
    stamp = tmp_path / "stamp"
    script = f"[ -e {stamp} ] && exit 2; touch {stamp}; {SERVE}"
    async with supervise(log, QUICK) as supervisor:
        await supervisor.bring_up([shell("a", script)])
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda: "a" not in supervisor.ready)
        stamp.unlink()
        await until(lambda: "a" in supervisor.ready)

        assert supervisor.failure is None


async def test_a_process_that_never_gets_ready_is_given_up(log):
    with pytest.raises(StartupError, match="a ended 5 times before it was ready"):
        await run_until_stopped(log, shell("a", "exit 1"))


async def test_ranks_stop_one_after_the_other(log, tmp_path):
    order = tmp_path / "order"
    slow = f"trap 'sleep 0.2; echo NAME >> {order}; exit 0' TERM; {READY}"
    forever = "while :; do sleep 0.05; done"
    processes = [
        shell(name, f"{slow}; {forever}".replace("NAME", name), rank)
        for name, rank in (("c", 2), ("a", 0), ("b", 1))
    ]
    async with supervise(log, QUICK) as supervisor:
        await supervisor.bring_up(processes)

    assert order.read_text().split() == ["a", "b", "c"]


async def test_a_process_that_does_not_stop_is_killed_at_its_deadline(log, text):
    stubborn = shell("a", f"trap '' TERM; {READY}; while :; do sleep 0.05; done")
    async with supervise(log, Timing(stop_s=(0.2,))) as supervisor:
        await supervisor.bring_up([stubborn])
        pid = stubborn.pid

    assert "a did not stop in time; killing it" in text.getvalue()
    assert not is_alive(pid)


async def test_a_second_request_to_stop_kills(log):
    stubborn = shell("a", f"trap '' TERM; {READY}; while :; do sleep 0.05; done")
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with supervise(log, Timing(stop_s=(60.0,))) as supervisor:
        await supervisor.bring_up([stubborn])
        supervisor.request_stop()
        loop.call_later(0.2, supervisor.request_stop)

    assert loop.time() - began < 10


async def test_what_a_crashed_process_leaves_behind_is_killed(log, tmp_path):
    orphan = tmp_path / "orphan"
    async with supervise(log, QUICK) as supervisor:
        await supervisor.bring_up([shell("a", f"sleep 100 & echo $! > {orphan}; {SERVE}")])
        pid = int(orphan.read_text())
        assert is_alive(pid)
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda: not is_alive(pid))


async def test_a_pipe_held_open_by_a_stranger_does_not_delay_the_restart(log, tmp_path):
    stamp = tmp_path / "stamp"
    escape = f"setsid sh -c 'echo $$ > {stamp}; exec sleep 100' & until [ -s {stamp} ]; do :; done"
    async with supervise(log, QUICK) as supervisor:
        assert await supervisor.bring_up(
            [shell("a", f"[ -e {stamp} ] || {{ {escape}; }}; {SERVE}")]
        )

    os.kill(int(stamp.read_text()), signal.SIGKILL)


async def test_an_error_when_all_is_ready_stops_in_order(log):
    def fail():
        raise StartupError("no room for the file")

    with pytest.raises(StartupError, match="no room"):
        await run_until_stopped(log, shell("a", SERVE), on_ready=fail)


def test_pauses_double_up_to_a_limit_and_start_anew_after_a_stable_time():
    life = _Life(Timing(first_pause_s=0.5, longest_pause_s=3.0, stable_s=30.0))

    assert [life.next_pause(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert [life.next_pause(31.0), life.next_pause(1.0), life.next_pause(1.0)] == [0.5, 0.5, 1.0]


def test_pauses_stay_finite_however_often_it_crashes():
    life = _Life(Timing(), crashes_in_a_row=100_000)

    assert life.next_pause(0.0) == 10.0
